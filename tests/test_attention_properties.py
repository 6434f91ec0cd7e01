"""Properties of every attention kernel, on shapes, strides and scales that hypothesis picks.

The same examples every time. Lengths cross tiles of 32 queries by 32 keys, those of TileLang on a
CPU, and by 16, those taken here in Triton's interpreter; on a GPU head dims are few, as most of
them compile anew. Memory that a Triton or TileLang kernel is to fill holds NaN beforehand, and so
do the gaps between rows and elements of what it reads.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from attention_contract import INF, NAN, PYTORCH_KERNELS, check_pytorch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from minitx.kernels import attention, kept
from minitx.testing import (
    AttentionResult,
    error_budget,
    max_error,
    oracle_attention,
    run_attention,
)

EPS32 = torch.finfo(torch.float32).eps
LAYOUTS = ("bhsd", "bshd", "bhds", "step2", "offset", "padded", "shared")

few_examples = settings(
    max_examples=8,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[
        Phase.explicit,
        Phase.generate,
    ],  # cases are small: shrinking takes the interpreter long
    # The fixtures are the same for all examples of a test; the interpreter is slow.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Case:
    """One input: sizes, strides by name for q, k, v and dout, scale, seed of the values."""

    B: int
    Hkv: int
    group: int
    Sq: int
    Skv: int
    D: int
    layouts: tuple[str, str, str, str]
    scale: float | None
    seed: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def tensors(self, device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """q, k, v, dout and dlse, which is float32."""
        generator, Hq = self.generator(), self.Hkv * self.group
        q, k, v, dout = (
            laid_out(torch.randn(shape, generator=generator).to(device, dtype), layout)
            for shape, layout in zip(
                (
                    (self.B, Hq, self.Sq, self.D),
                    (self.B, self.Hkv, self.Skv, self.D),
                    (self.B, self.Hkv, self.Skv, self.D),
                    (self.B, Hq, self.Sq, self.D),
                ),
                self.layouts,
                strict=True,
            )
        )
        return [q, k, v, dout, torch.randn(q.shape[:3], generator=generator).to(device)]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x [B, H, S, D] with other strides, and NaN in the gaps. "shared" keeps the first head only,
    and shows it as all."""
    match layout:
        case "bshd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "bhds":
            return x.transpose(2, 3).contiguous().transpose(2, 3)
        case "step2":
            return torch.stack((x, torch.full_like(x, NAN)), -1).flatten(-2)[..., ::2]
        case "offset":
            return torch.cat((x.new_full((1,), NAN), x.flatten()))[1:].view(x.shape)
        case "padded":
            padded = torch.nn.functional.pad(x, (0, 3, 0, 2), value=NAN)
            return padded[..., : x.shape[2], : x.shape[3]]
        case "shared":
            return x[:, :1].expand(x.shape)
    return x


def cases(
    widest: int = 32,
    scales: st.SearchStrategy[float | None] = st.none() | st.floats(-2, 2),  # noqa: B008
) -> st.SearchStrategy[Case]:
    """Head dims are up to `widest`, which may be 33: that is padded to 64."""
    if torch.cuda.is_available():
        head_dims = st.sampled_from([D for D in (1, 8, 32, 33) if widest >= D])
    else:
        head_dims = st.integers(1, widest)
    # None or one; any; more than a tile.
    length = st.integers(0, 1) | st.integers(2, 40) | st.integers(33, 40)
    return st.builds(
        Case,
        B=st.integers(1, 3),
        Hkv=st.integers(1, 2),
        group=st.integers(1, 3),
        Sq=length,
        Skv=length,
        D=head_dims,
        layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
        scale=scales,
        seed=st.integers(0, 2**16),
    )


@pytest.fixture(autouse=True)
def _small_tiles(kernel, monkeypatch) -> None:
    """The interpreter's own tiles would hold 40 queries and 40 keys at once."""
    if kernel == "triton":
        from minitx.kernels import triton_attention_tiles as tiles

        monkeypatch.setattr(tiles, "interpreter_tiles", lambda q, k: tiles.Tiles(32, 16, 4, 1))


@contextlib.contextmanager
def poisoned(kernel: str) -> Iterator[None]:
    """Uninitialised memory holds NaN, but for PyTorch's kernels, of which not all can be
    deterministic."""
    torch.use_deterministic_algorithms(kernel not in PYTORCH_KERNELS)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kept, "_empty_strided_cuda", None)  # which would fill nothing
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(kernel: str, q, k, v, dout, dlse=None, **kwargs) -> AttentionResult:
    """run_attention on poisoned memory, with lse where there is one."""
    with poisoned(kernel):
        return run_attention(
            kernel, q, k, v, dout, dlse=dlse, return_lse=kernel != "sdpa", **kwargs
        )


def assert_same(kernel: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit; PyTorch may choose another kernel for another batch, and not all of its own are
    deterministic."""
    if kernel in PYTORCH_KERNELS:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(actual, expected)


# Values


def check(kernel: str, case: Case, device: str, dtype: torch.dtype, is_causal: bool) -> None:
    """out, lse and gradients against float64, within minitx.testing's budget and `roundings`."""
    q, k, v, dout, dlse = case.tensors(device, dtype)
    if kernel == "sdpa" or case.seed % 2:
        dlse = None
    kwargs = {"is_causal": is_causal, "scale": case.scale}
    actual = run(kernel, q, k, v, dout, dlse, **kwargs)
    truth = oracle_attention(q, k, v, dout, dlse=dlse, **kwargs)
    assert actual.out.dtype == actual.dq.dtype == actual.dk.dtype == actual.dv.dtype == dtype
    if kernel in PYTORCH_KERNELS:
        check_pytorch(actual, truth, dtype)
        return
    assert actual.lse is not None
    assert actual.lse.dtype == torch.float32
    eager = run_attention("eager", q, k, v, dout, dlse=dlse, **kwargs)
    more = roundings(q, k, v, dout, truth, **kwargs)
    for name in ("out", "lse", "dq", "dk", "dv"):
        got, baseline, want = (getattr(result, name) for result in (actual, eager, truth))
        budget = error_budget(baseline, want, dtype) + more.get(name, 0.0)
        assert got.shape == want.shape, name
        assert max_error(got, want) <= budget, f"{name}: {max_error(got, want)} > {budget}"


def largest(x: torch.Tensor) -> float:
    """The largest of what is finite, without its sign; 0 where nothing is."""
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def roundings(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    truth: AttentionResult,
    *,
    is_causal: bool,
    scale: float | None,
) -> dict[str, float]:
    """What a kernel that keeps no scores rounds, and eager attention may not. On few elements
    eager's own error says nothing of it: with one key that error is 0.

    - A logit of size L is rounded by L * eps / 2 in float32, and its probability by as much of
      itself. L counts as far as the largest |lse|: what lies below it has no weight.
    - delta_i = sum_d dout_id out_id takes out as it was rounded, so it is off by delta_size * eps,
      delta_size being sum_d |dout_id out_id|. In ds_ij = p_ij (dout_i v_j - delta_i) that is p_ij
      times as much; in dq_i at most |scale| max|k| times, as rows of p sum to 1, and in dk_j
      |scale| max|q| times the sum of column j of p, which is what dv_j is for dout = 1.
    """

    logit = EPS32 * largest(truth.lse)
    ones = oracle_attention(q, k, v, torch.ones_like(q), is_causal=is_causal, scale=scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    delta_size = largest((dout.double() * truth.out).abs().sum(-1))
    ds = abs(scale) * delta_size * torch.finfo(q.dtype).eps
    return {
        "out": logit * max(largest(truth.out), 1.0),
        "dq": logit * max(largest(truth.dq), 1.0) + ds * largest(k),
        "dk": logit * max(largest(truth.dk), 1.0) + ds * largest(q) * largest(ones.dv),
        "dv": logit * max(largest(truth.dv), 1.0),
    }


@pytest.mark.contract("shapes and grouped heads", "strides", "scale", "dtypes")
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@given(case=cases(widest=33))
@few_examples
def test_float32(kernel, device, is_causal, case):
    check(kernel, case, device, torch.float32, is_causal)


@pytest.mark.contract("shapes and grouped heads", "strides", "scale", "dtypes")
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@given(case=cases())
@few_examples
def test_half_precision(kernel, device, dtype, is_causal, case):
    check(kernel, case, device, dtype, is_causal)


# Symmetries


@pytest.mark.contract("shapes and grouped heads")
@given(case=cases(), is_causal=st.booleans())
@few_examples
def test_batch_and_heads_may_be_permuted(kernel, device, case, is_causal):
    # Key heads with their groups: within a group the order is that of a sum.
    q, k, v, dout, _ = case.tensors(device)
    batch = torch.randperm(case.B, generator=case.generator())
    heads = torch.randperm(case.Hkv, generator=case.generator())

    def permuted(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (case.Hkv, -1))[batch][:, heads].flatten(1, 2)

    plain = [t.contiguous() for t in (q, k, v, dout)]
    expected = run(kernel, *plain, is_causal=is_causal, scale=case.scale)
    actual = run(kernel, *map(permuted, plain), is_causal=is_causal, scale=case.scale)
    for name in ("out", "dq", "dk", "dv"):
        assert_same(kernel, getattr(actual, name), permuted(getattr(expected, name)))


@pytest.mark.contract("shapes and grouped heads", "determinism")
@given(case=cases(), is_causal=st.booleans())
@few_examples
def test_a_batch_element_does_not_know_its_neighbours(kernel, device, case, is_causal):
    tensors = case.tensors(device)[:4]
    whole = run(kernel, *tensors, is_causal=is_causal, scale=case.scale)
    for i in range(case.B):
        alone = run(kernel, *(t[i : i + 1] for t in tensors), is_causal=is_causal, scale=case.scale)
        for name in ("out", "dq", "dk", "dv"):
            assert_same(kernel, getattr(alone, name), getattr(whole, name)[i : i + 1])


@pytest.mark.contract("causal, aligned bottom-right")
@given(case=cases(), first=st.integers(0, 40))
@few_examples
def test_the_future_does_not_change_the_past(kernel, device, case, first):
    # Keys from `first` on are seen by queries from first - (Skv - Sq) on, and by no others. What
    # those others give and their gradients are bit for bit the same whatever these keys are, and so
    # are these keys' gradients, whatever the others ask and get.
    q, k, v, dout, _ = (t.contiguous() for t in case.tensors(device))
    first = min(first, case.Skv)
    n_past = max(0, min(case.Sq, first - (case.Skv - case.Sq)))
    before = run(kernel, q, k, v, dout, is_causal=True, scale=case.scale)

    def changed(x: torch.Tensor, positions: slice) -> torch.Tensor:
        x = x.clone()
        x[:, :, positions] = 100 * torch.randn(x[:, :, positions].shape).to(x)
        return x

    past, future = slice(0, n_past), slice(first, None)
    after = run(
        kernel, q, changed(k, future), changed(v, future), dout, is_causal=True, scale=case.scale
    )
    for name in ("out", "lse", "dq"):
        if getattr(before, name) is not None:
            same = (getattr(result, name)[:, :, past] for result in (after, before))
            assert_same(kernel, *same)
    after = run(
        kernel, changed(q, past), k, v, changed(dout, past), is_causal=True, scale=case.scale
    )
    for name in ("dk", "dv"):
        same = (getattr(result, name)[:, :, future] for result in (after, before))
        assert_same(kernel, *same)


@pytest.mark.contract("NaN, inf and huge logits")
@given(case=cases(scales=st.sampled_from([1.0, 0.5, -1.0])), is_causal=st.booleans())
@few_examples
def test_a_shift_of_all_logits_changes_lse_alone(kernel, device, case, is_causal):
    # Keys k_j + c have logits that are larger by scale * q_i c for every j. With multiples of 1/8
    # up to 1 in q and k, and whole numbers up to 64 in c, every score is exact in float32, shifted
    # or not: a multiple of 1/64 below 2^12. Exponentials of the shifted ones would overflow. What
    # is left is the rounding of the exponents, in base 2 of size 1.45 L for the largest logit L.
    # Each of two terms, scores and maximum, is off by eps/2 of that, the exponential by 2 eps:
    # below 2 (L + 1) eps of each p, and twice that with the denominator, once for each of two runs.
    generator = case.generator()

    def grid(shape: tuple[int, ...], most: int, step: float) -> torch.Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).to(device) * step

    v = case.tensors(device)[2]
    q = grid((case.B, case.Hkv * case.group, case.Sq, case.D), 8, 1 / 8)
    k = grid((case.B, case.Hkv, case.Skv, case.D), 8, 1 / 8)
    c = grid((case.B, case.Hkv, 1, case.D), 64, 1.0)

    def forward(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        has_lse = kernel != "sdpa"
        kwargs = {"is_causal": is_causal, "scale": case.scale, "return_lse": has_lse}
        result = attention(q, k, v, kernel=kernel, **kwargs)
        return result if has_lse else (result, None)

    (out, lse), (shifted_out, shifted_lse) = forward(k), forward(k + c)
    shift = case.scale * (q * c.repeat_interleave(case.group, 1)).double().sum(-1)
    logit = largest(shift) + case.D
    tolerance = EPS32 * (8 * (logit + 1) + case.Skv) * max(1.0, largest(v))
    assert max_error(shifted_out, out) <= tolerance
    if lse is not None:
        assert max_error(shifted_lse, lse + shift) <= 4 * EPS32 * (logit + 4)


@pytest.mark.contract("empty rows", "sizes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@given(case=cases(), is_causal=st.booleans())
@few_examples
def test_probabilities_are_a_partition_of_unity(kernel, device, dtype, case, is_causal):
    # v = 1 gives 1 where there is a key, and what dv sums to over keys is dout over queries with
    # one. Each p, each element of out or dv and each sum over a group of heads is rounded by eps/2;
    # sums in float32 of n terms by n eps/2; and the logits and lse, of size L, that a backward
    # makes p of again, by L eps/2 each.
    q, k, v, dout, _ = case.tensors(device, dtype)
    kwargs = {"is_causal": is_causal, "scale": case.scale}
    actual = run(kernel, q, k, torch.ones_like(v), dout, **kwargs)
    eps = torch.finfo(dtype).eps
    n_empty = max(0, case.Sq - case.Skv) if is_causal else case.Sq * (case.Skv == 0)
    assert not actual.out[:, :, :n_empty].any()
    error = actual.out[:, :, n_empty:].double() - 1
    assert (error.abs() <= eps + case.Skv * EPS32).all()

    seen = dout[:, :, n_empty:].double().unflatten(1, (case.Hkv, case.group))
    logit = largest(oracle_attention(q, k, v, dout, **kwargs).lse)
    relative = 2 * eps + (case.group * case.Sq + case.Skv + logit) * EPS32
    error = actual.dv.double().sum(2) - seen.sum((2, 3))
    assert (error.abs() <= relative * seen.abs().sum((2, 3))).all()
    if actual.lse is not None:
        assert (actual.lse[:, :, :n_empty] == -INF).all()
        assert actual.lse[:, :, n_empty:].isfinite().all()
