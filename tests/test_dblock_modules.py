"""The mathematics against the tables of closed-form values (computed independently, to the digits given)."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import dblock_modules as dblock
from dblock_modules import LogNormalLevels, Partition, make_partition, make_schedule, visits, widen_log

LEVELS = LogNormalLevels()
ALL_B = (1, 2, 3, 4, 6)
# Ascending edges and masses, low to high noise.
EQUI = {
    1: [0.002, 80],
    2: [0.002, 0.301200, 80],
    3: [0.002, 0.179632, 0.505041, 80],
    4: [0.002, 0.134076, 0.301200, 0.676649, 80],
    6: [0.002, 0.0943401, 0.179632, 0.301200, 0.505041, 0.961665, 80],
}
LOG_UNIFORM = {
    1: ([0.002, 80], [1]),
    2: ([0.002, 0.4, 80], [0.593443, 0.406557]),
    3: ([0.002, 0.0683990, 2.33921, 80], [0.108341, 0.847858, 0.043801]),
    4: ([0.002, 0.0282843, 0.4, 5.65685, 80], [0.024336, 0.569108, 0.399297, 0.007260]),
    6: ([0.002, 0.0116961, 0.068399, 0.4, 2.33921, 13.6798, 80], [0.003379, 0.104962, 0.485102, 0.362756, 0.043066, 0.000735]),
}
LINEAR = {
    1: ([0.002, 80], [1]),
    2: ([0.002, 40.001, 80], [0.999979, 0.000021]),
    3: ([0.002, 26.668, 53.334, 80], [0.999908, 0.000085, 0.000006]),
    4: ([0.002, 20.0015, 40.001, 60.0005, 80], [0.999766, 0.000213, 0.000018, 0.000003]),
    6: ([0.002, 13.335, 26.668, 40.001, 53.334, 66.667, 80], [0.999209, 0.000699, 0.000070, 0.000015, 0.000005, 0.000002]),
}
# (overlap, B): training intervals after the clamp, low to high noise, and their mass.
OVERLAP = {
    (0.05, 2): [(0.002, 0.387032, 0.58275), (0.227847, 80, 0.59196)],
    (0.05, 3): [(0.002, 0.224933, 0.40388), (0.170584, 0.531832, 0.36436), (0.392048, 80, 0.41306)],
    (0.05, 4): [
        (0.002, 0.165450, 0.30880),
        (0.128759, 0.313639, 0.27405),
        (0.289254, 0.704593, 0.27405),
        (0.533000, 80, 0.31717),
    ],
    (0.05, 6): [
        (0.002, 0.114388, 0.20988),
        (0.091351, 0.185511, 0.18310),
        (0.175050, 0.309085, 0.18305),
        (0.293516, 0.518264, 0.18305),
        (0.489038, 0.993136, 0.18310),
        (0.770940, 80, 0.21675),
    ],
    (0.1, 2): [(0.002, 0.497322, 0.66199), (0.172358, 80, 0.67910)],
    (0.1, 3): [(0.002, 0.281657, 0.47771), (0.161991, 0.560043, 0.39476), (0.304334, 80, 0.49656)],
    (0.1, 4): [
        (0.002, 0.204166, 0.37295),
        (0.123652, 0.326592, 0.29783),
        (0.277782, 0.733692, 0.29783),
        (0.419847, 80, 0.39098),
    ],
    (0.1, 6): [
        (0.002, 0.138696, 0.25906),
        (0.088456, 0.191582, 0.19946),
        (0.170584, 0.317177, 0.19936),
        (0.286028, 0.531832, 0.19936),
        (0.473541, 1.02564, 0.19946),
        (0.618041, 80, 0.27459),
    ],
    (0.05, 1): [(0.002, 80, 1.0)],
}


def ascending(partition: Partition) -> list[float]:
    return list(partition.edges[::-1])


@pytest.mark.parametrize("B", ALL_B)
def test_equi_probability_edges(B):
    partition = make_partition("equi_probability", B, LEVELS)
    assert ascending(partition) == pytest.approx(EQUI[B], rel=3e-6)
    assert partition.masses(LEVELS) == pytest.approx([1 / B] * B, abs=1e-12)


@pytest.mark.parametrize(("name", "table"), [("log_uniform", LOG_UNIFORM), ("uniform", LINEAR)])
@pytest.mark.parametrize("B", ALL_B)
def test_other_partitions(name, table, B):
    edges, masses = table[B]
    partition = make_partition(name, B, LEVELS)
    assert ascending(partition) == pytest.approx(edges, rel=1e-5)
    assert partition.masses(LEVELS)[::-1] == pytest.approx(masses, abs=1.1e-6)


@pytest.mark.parametrize("key", list(OVERLAP))
def test_overlap_intervals_and_masses(key):
    overlap, B = key
    partition = make_partition("equi_probability", B, LEVELS)
    for block, (low, high, mass) in enumerate(OVERLAP[key][::-1]):
        got = widen_log(*partition.interval(block), overlap, 0.002, 80.0)
        assert got == pytest.approx((low, high), rel=3e-5)
        q = LEVELS.cdf(torch.tensor(got, dtype=torch.float64))
        assert float(q[1] - q[0]) == pytest.approx(mass, abs=1.1e-5)


def test_overlap_scales_the_log_width():
    low, high = widen_log(0.2, 0.5, 0.1, 0.002, 80)
    assert math.log(high / low) == pytest.approx(1.2 * math.log(0.5 / 0.2))
    assert widen_log(0.2, 0.5, 0.0, 0.002, 80) == (0.2, 0.5)


def test_log_normal_matches_scipy_and_inverts():
    a, b = (np.log([0.002, 80]) + 1.2) / 1.2
    reference = stats.truncnorm(a, b, loc=-1.2, scale=1.2)
    sigma = np.geomspace(0.002, 80, 301)
    q = LEVELS.cdf(torch.from_numpy(sigma))
    assert np.allclose(q, reference.cdf(np.log(sigma)), atol=1e-13)
    inner = slice(30, -60)  # near q = 1 float64 has no digits left to invert
    assert np.allclose(LEVELS.inverse_cdf(q)[inner], sigma[inner], rtol=1e-9)


@pytest.mark.parametrize(("low", "high"), [(0.002, 80), (0.1796, 0.505), (0.0021, 0.0022), (5.0, 80.0)])
def test_sampling_in_an_interval_has_its_distribution(low, high):
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sigma = dblock.sample_interval(LEVELS, low, high, uniform)
    assert sigma.dtype == torch.float64 and sigma.min() >= low and sigma.max() <= high
    q_low, q_high = LEVELS.cdf(torch.tensor([low, high], dtype=torch.float64)).tolist()

    def cdf(level: np.ndarray) -> np.ndarray:
        return (LEVELS.cdf(torch.from_numpy(level)).numpy() - q_low) / (q_high - q_low)

    assert stats.kstest(sigma.numpy(), cdf).pvalue > 0.01


@pytest.mark.parametrize("B", (2, 3, 4, 6))
@pytest.mark.parametrize("name", ["equi_probability", "log_uniform", "uniform"])
def test_router_edges_belong_below_in_any_precision(name, B):
    partition = make_partition(name, B, LEVELS)
    for block, edge in enumerate(partition.edges[1:-1]):
        for level in (edge, edge * (1 + 5e-10), edge * (1 - 5e-10), float(np.float32(edge)), np.exp(np.log(edge))):
            assert partition.block_of(level) == block + 1
        assert partition.block_of(edge * 1.001) == block
    assert partition.block_of(80.0) == partition.block_of(float(np.float32(80.0 * (1 + 1e-7)))) == 0
    assert partition.block_of(0.002) == B - 1
    for outside in (81.0, 0.0019):
        with pytest.raises(ValueError, match="outside"):
            partition.block_of(outside)


@pytest.mark.parametrize("B", (2, 3, 4, 6))
def test_equi_probability_schedule_hits_every_block(B):
    partition = make_partition("equi_probability", B, LEVELS)

    def owners(n):
        return [partition.block_of(s) for s in make_schedule("equi_probability", n, LEVELS, partition)]

    assert owners(B) == list(range(B))
    assert owners(B + 1) == [*range(B), B - 1]  # the released code leaves a block out here
    assert owners(2 * B) == [block for block in range(B) for _ in range(2)]


@pytest.mark.parametrize(("B", "counts"), [(2, [35, 15]), (3, [33, 4, 13]), (4, [32, 3, 3, 12]), (6, [30, 3, 2, 2, 2, 11])])
def test_karras_50_visits(B, counts):
    partition = make_partition("equi_probability", B, LEVELS)
    assert visits(make_schedule("karras", 50, LEVELS, partition), partition) == counts


@pytest.mark.parametrize(("B", "first"), [(3, 4), (4, 12), (6, 19)])
def test_karras_first_reaches_all_blocks(B, first):
    partition = make_partition("equi_probability", B, LEVELS)
    reaches = [0 not in visits(make_schedule("karras", n, LEVELS, partition), partition) for n in range(1, first + 1)]
    assert reaches == [False] * (first - 1) + [True]


@pytest.mark.parametrize("name", ["karras", "equi_probability", "per_block"])
@pytest.mark.parametrize("cut", ["equi_probability", "log_uniform", "uniform"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 50])
def test_schedules_decrease_and_have_n_nodes(name, cut, n):
    partition = make_partition(cut, 3, LEVELS)
    schedule = make_schedule(name, n, LEVELS, partition)
    assert schedule.shape == (n,) and schedule.dtype == np.float64
    assert schedule[0] == 80.0 and (np.diff(schedule) < 0).all() and schedule[-1] >= 0.002
    if name == "per_block" and n >= 3:
        counts = visits(schedule, partition)
        assert max(counts) - min(counts) <= 1 and sum(counts) == n


def test_karras_is_equation_5():
    s = make_schedule("karras", 18, LEVELS, make_partition("uniform", 1, LEVELS))
    expected = [(80 ** (1 / 7) + i / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for i in range(18)]
    assert s == pytest.approx(expected, rel=1e-13)


def test_preconditioning_closed_forms():
    sigma = torch.tensor([0.002, 0.5, 80.0], dtype=torch.float64)
    c = dblock.precondition(sigma, 0.5)
    assert torch.allclose(c.c_in**2 * (sigma**2 + 0.25), torch.ones(3).double())  # unit variance into F
    assert torch.allclose(c.c_out**2 * dblock.edm_weight(sigma, 0.5), torch.ones(3).double())  # unit weight on F
    assert torch.allclose(c.c_noise, sigma.log() / 4)
    assert dblock.edm_weight(sigma, 0.5)[0] == pytest.approx(250_004)
    assert c.c_skip.tolist() == pytest.approx([0.25 / (0.25 + 4e-6), 0.5, 0.25 / 6400.25])


def test_mean_weight_per_block():
    """Mean of 4 + 1/sigma^2 inside each block, K = 3, low to high noise: 556.5, 17.04, 5.37."""
    partition = make_partition("equi_probability", 3, LEVELS)
    density = stats.norm(-1.2, 1.2).pdf

    def weighted(u: float) -> float:
        return density(u) * float(dblock.edm_weight(torch.tensor(math.exp(u), dtype=torch.float64), 0.5))

    means = []
    for block in (2, 1, 0):
        low, high = np.log(partition.interval(block))
        means.append(integrate.quad(weighted, low, high, limit=200)[0] / integrate.quad(density, low, high)[0])
    assert means == pytest.approx([556.5, 17.04, 5.37], rel=1e-3)


@pytest.mark.parametrize("depth", [3, 7, 12, 24])
@pytest.mark.parametrize("B", [1, 2, 3])
def test_even_layer_split_owns_every_layer_once(depth, B):
    layers = dblock.split_layers(depth, B)
    assert sum(layers) == depth and len(layers) == B and max(layers) - min(layers) <= 1


def test_listed_layers():
    assert dblock.split_layers(12, 3, [3, 6, 3]) == [3, 6, 3]
    for wrong in ([3, 6], [3, 6, 4], [6, 6, 0], [13, -2, 1]):
        with pytest.raises(ValueError, match="layers"):
            dblock.split_layers(12, 3, wrong)
    with pytest.raises(ValueError, match="num_blocks=13"):
        dblock.split_layers(12, 13)


@pytest.mark.parametrize("B", [1, 2, 3, 4])
def test_a_split_by_cost_has_the_cheapest_costliest_block_of_all_splits(B):
    random = np.random.default_rng(B)
    for depth in range(B, 9):
        costs = random.random(depth)

        def costliest(counts, costs=costs):
            return max(part.sum() for part in np.split(costs, np.cumsum(counts)[:-1]))

        cuts = itertools.combinations(range(1, depth), B - 1)
        everything = [np.diff([0, *inner, depth]) for inner in cuts]
        found = dblock.split_costs(costs.tolist(), B)
        assert sum(found) == depth and len(found) == B
        assert costliest(found) == pytest.approx(min(map(costliest, everything)))
    assert sorted(dblock.split_costs([1.0] * 7, 3)) == [2, 2, 3]


def test_bad_partitions():
    for edges in ((1.0,), (1.0, 1.0, 0.1), (0.1, 1.0), (80, 0.1, 0.2, 0.002)):
        with pytest.raises(ValueError, match="decrease"):
            Partition(edges)
    with pytest.raises(ValueError, match="custom"):
        make_partition("custom", 2, LEVELS, [80, 1, 0.01])
    with pytest.raises(ValueError, match="is one of"):
        make_partition("equal", 2, LEVELS)
    assert make_partition("custom", 2, LEVELS, [80, 1, 0.002]).edges == (80.0, 1.0, 0.002)


def test_weightings_meet_where_they_should():
    """In units of 1 / sigma_data^2: SNR + 1, 1 and min(SNR, 5), with SNR = (sigma_data / sigma)^2."""
    sigma = torch.tensor([0.002, 0.1, 0.5, 80.0], dtype=torch.float64)
    snr = (0.5 / sigma) ** 2
    assert (dblock.WEIGHTINGS["edm"](sigma, 0.5) / 4).tolist() == pytest.approx((snr + 1).tolist())
    assert dblock.WEIGHTINGS["flat"](sigma, 0.5).tolist() == [4.0] * 4
    assert dblock.WEIGHTINGS["min_snr"](sigma, 0.5).tolist() == pytest.approx([20.0, 20.0, 4.0, 4 * snr[-1].item()])


# ---------------------------------------------------------------------------------------------------------------------
# Levels of flow matching and of discrete schedulers

FLOW = {
    "uniform": (dblock.UniformLevels(), stats.uniform()),
    "logit_normal": (dblock.LogitNormalLevels(-0.4, 1.3), None),
    "beta": (dblock.BetaLevels(0.6, 2.0), stats.beta(0.6, 2.0)),
    "mode": (dblock.ModeLevels(1.29), None),
    "shifted": (dblock.ShiftedLevels(dblock.LogitNormalLevels(0.2, 0.9), 3.0), None),
}
Q = torch.linspace(0, 1, 41, dtype=torch.float64)


@pytest.mark.parametrize("name", FLOW)
def test_cdf_and_its_inverse_undo_each_other(name):
    levels, reference = FLOW[name]
    x = levels.inverse_cdf(Q)
    assert (x.diff() > 0).all()
    np.testing.assert_allclose([x[0], x[-1]], [0, 1], atol=1e-12)
    np.testing.assert_allclose(levels.cdf(x), Q, atol=1e-12)
    if reference is not None:
        np.testing.assert_allclose(levels.cdf(Q), reference.cdf(Q.numpy()), atol=1e-12)


def test_logit_normal_levels_are_normal_in_logit():
    levels = dblock.LogitNormalLevels(-0.4, 1.3)
    x = np.array([0.03, 0.4, 0.9])
    np.testing.assert_allclose(levels.cdf(torch.tensor(x)), stats.norm(-0.4, 1.3).cdf(np.log(x / (1 - x))), rtol=1e-12)


def test_mode_levels_follow_their_formula():
    u = np.linspace(0, 1, 9)
    expected = 1 - u - 1.29 * (np.cos(np.pi * u / 2) ** 2 - 1 + u)
    np.testing.assert_allclose(dblock.ModeLevels(1.29).inverse_cdf(torch.tensor(1 - u)), expected, atol=1e-12)
    np.testing.assert_allclose(dblock.ModeLevels(0.0).cdf(Q), Q, atol=1e-12)


def test_a_shift_adds_its_logarithm_to_the_logit():
    """logit(shift x / (1 + (shift - 1) x)) = logit(x) + ln shift, so a shifted logit-normal is a logit-normal."""
    shifted = dblock.ShiftedLevels(dblock.LogitNormalLevels(0.2, 0.9), 3.0)
    same = dblock.LogitNormalLevels(0.2 + math.log(3), 0.9)
    np.testing.assert_allclose(shifted.inverse_cdf(Q), same.inverse_cdf(Q), atol=1e-12)
    edges = make_partition("equi_probability", 4, dblock.ShiftedLevels(dblock.UniformLevels(), 3.0)).edges
    np.testing.assert_allclose(edges, [1, 0.9, 0.75, 0.5, 0])


def test_discrete_levels_are_shared_out_evenly():
    levels = dblock.DiscreteLevels(tuple(step / 10 for step in range(10)))
    edges = make_partition("equi_probability", 5, levels).edges
    np.testing.assert_allclose(edges, [1, 0.75, 0.55, 0.35, 0.15, 0])
    np.testing.assert_allclose(Partition(edges).masses(levels), [0.2] * 5)


def test_weights_count_and_weightless_levels_are_never_drawn():
    levels = dblock.DiscreteLevels((0.1, 0.2, 0.3, 0.4), (0.0, 1.0, 1.0, 2.0))
    assert make_partition("equi_probability", 2, levels).edges == (1.0, 0.35, 0.0)
    drawn = dblock.sample_interval(levels, 0.0, 0.35, torch.linspace(0, 0.999, 50, dtype=torch.float64))
    assert set(drawn.tolist()) == {0.2, 0.3}


@pytest.mark.parametrize("num_blocks", [2, 3, 4])
def test_duplicate_quantiles_leave_no_block_without_levels(num_blocks):
    """Half of a list is 1 and a quarter .75: the quantiles of 3 or 4 blocks coincide there."""
    levels = dblock.DiscreteLevels((1.0,) * 6 + (0.75,) * 3 + (0.5, 0.25, 0.1))
    partition = make_partition("equi_probability", num_blocks, levels)
    masses = partition.masses(levels)
    assert min(masses) > 0
    assert sum(masses) == pytest.approx(1)
    for block in range(num_blocks):
        drawn = dblock.sample_interval(levels, *partition.interval(block), torch.linspace(0, 0.999, 20, dtype=torch.float64))
        assert {partition.block_of(level) for level in drawn.tolist()} == {block}


def test_too_few_discrete_levels_and_wrong_weights_are_refused():
    with pytest.raises(ValueError, match="2 different levels"):
        make_partition("equi_probability", 3, dblock.DiscreteLevels((0.5, 0.5, 0.1)))
    with pytest.raises(ValueError, match="as many weights"):
        dblock.DiscreteLevels((0.1, 0.2), (1.0,))
    with pytest.raises(ValueError, match="must lie in"):
        dblock.DiscreteLevels((0.1, 2.0))
    with pytest.raises(ValueError, match="log_uniform needs levels above 0"):
        make_partition("log_uniform", 2, dblock.UniformLevels())


def test_linear_overlap_and_overlap_on_another_scale():
    assert dblock.widen_linear(0.25, 0.75, 0.1, 0.0, 1.0) == pytest.approx((0.2, 0.8))
    assert dblock.widen_linear(0.5, 1.0, 0.1, 0.0, 1.0) == pytest.approx((0.45, 1.0))
    levels = np.geomspace(0.002, 80, 20001)
    wide = dblock.widen_on_scale(0.18, 0.505, 0.05, 0.002, 80.0, levels, np.log(levels))
    assert wide == pytest.approx(widen_log(0.18, 0.505, 0.05, 0.002, 80.0), rel=1e-6)
    assert dblock.widen_on_scale(0.5, 1.0, 0.0, 0.0, 1.0, np.array([0.001, 0.999]), np.array([-7.0, 7.0]))[1] == 1.0
