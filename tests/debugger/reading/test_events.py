"""Times against exact fractions, and classes of events against names that were seen in the wild."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.debugger.reading.classes import Category, call_of, category, is_communication, itemsize, work_of
from fourfold.debugger.reading.events import MISSING, exact_nanoseconds, integer, nanoseconds
from fourfold.debugger.reading.trace import Call, Work


@given(st.lists(st.integers(0, 10**12 * 8), max_size=9))
def test_three_decimals_come_back_whole_from_floats(times):
    texts = [f"{t // 1000}.{t % 1000:03d}" for t in times]
    found = nanoseconds([float(text) for text in texts])
    assert found is not None
    assert found.tolist() == [int(Fraction(text) * 1000) for text in texts]


@given(st.lists(st.integers(0, 9 * 10**18 // 1000), min_size=1, max_size=9))
def test_whole_microseconds_of_any_size(times):
    found = nanoseconds(times)
    assert found is not None
    assert found.tolist() == [t * 1000 for t in times]


def test_dates_with_decimals_are_left_to_exact_numbers():
    assert nanoseconds([1711964646000000.123, 1.0]) is None
    found = exact_nanoseconds([Decimal("1711964646000000.123"), None, Decimal("0.0014999"), Decimal("1e30")])
    assert found.tolist() == [1711964646000000123, MISSING, 1, MISSING]


def test_what_is_no_time():
    found = nanoseconds([1, None, "x", True, 2.5, [1], 10**30])
    assert found is not None
    assert found.tolist() == [1000, MISSING, MISSING, MISSING, 2500, MISSING, MISSING]
    assert np.array_equal(nanoseconds([]), [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, 7),
        ("7", 7),
        ("0x10", 16),
        (7.0, 7),
        (7.5, -1),
        ("a", -1),
        (None, -1),
        (True, -1),
        ([7], -1),
        (1e400, -1),
        (2**80, -1),
    ],
)
def test_integers_of_whatever_stands_there(value, expected):
    assert integer(value, -1) == expected


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", Call.ALL_REDUCE),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", Call.ALL_REDUCE),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Call.REDUCE_SCATTER),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Call.ALL_GATHER),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Call.BROADCAST),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", Call.MESSAGE),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", Call.MESSAGE),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", Call.OTHER),
        ("ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)", Call.OTHER),
        ("rcclGenericKernel<1, false>", Call.OTHER),
        ("mscclpp_allreduce6", Call.ALL_REDUCE),
        ("oneccl_allreduce_small", Call.ALL_REDUCE),
        ("nccl:all_gather", Call.ALL_GATHER),
        ("nccl:_all_gather_base", Call.ALL_GATHER),
        ("nccl:_reduce_scatter_base", Call.REDUCE_SCATTER),
        ("gloo:all_reduce", Call.ALL_REDUCE),
        ("gloo:send", Call.SEND),
        ("gloo:recv", Call.RECV),
        ("c10d::allreduce_", Call.ALL_REDUCE),
        ("c10d::alltoall_base_", Call.ALL_TO_ALL),
        ("NCCL_ALLGATHER", Call.ALL_GATHER),
    ],
)
def test_communication_by_its_name(name, call):
    assert is_communication(name)
    assert call_of(name) is call


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("allreduce", Call.ALL_REDUCE),
        ("_allgather_base", Call.ALL_GATHER),
        ("_reduce_scatter_base", Call.REDUCE_SCATTER),
        ("reduce_scatter_tensor_coalesced", Call.REDUCE_SCATTER),
        ("all_to_allv", Call.ALL_TO_ALL),
        ("barrier", Call.BARRIER),
        ("recv", Call.RECV),
        ("send", Call.SEND),
        ("wait", Call.OTHER),
        ("F", Call.OTHER),
        ("GATHER", Call.OTHER),
    ],
)
def test_collective_names(name, call):
    assert call_of(name) is call


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", Work.GEMM),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", Work.GEMM),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(cutlass_80)", Work.GEMM),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", Work.GEMM),
        ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32", Work.GEMM),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32", Work.GEMM),
        ("aten::mm", Work.GEMM),
        ("aten::addmm", Work.GEMM),
        ("aten::matmul", Work.GEMM),
        ("autograd::engine::evaluate_function: MmBackward0", Work.GEMM),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>", Work.ATTENTION),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)", Work.ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)", Work.ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", Work.ATTENTION),
        ("aten::scaled_dot_product_attention", Work.ATTENTION),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>(int)", Work.MEMORY),
        ("void cudnn::ops::nchwToNhwcKernel<float>", Work.MEMORY),
        ("void cutlass_cudnn_train::Kernel<cutlass_cudnn_train::reduction::kernel::ReduceSplitK<x>>", Work.MEMORY),
        ("Memcpy DtoD (Device -> Device)", Work.MEMORY),
        ("aten::softmax", Work.MEMORY),
        ("aten::add_", Work.MEMORY),
        ("Stream Sync", None),
        ("Event Sync", None),
        ("Context Sync", None),
        ("Stream Wait Event", None),
    ],
)
def test_work_by_its_name(name, work):
    assert work_of(name) is work
    assert not is_communication(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kernel", Category.DEVICE),
        ("Kernel", Category.DEVICE),
        ("gpu_memcpy", Category.DEVICE),
        ("Memcpy", Category.DEVICE),
        ("cuda_runtime", Category.LAUNCH),
        ("hip_runtime", Category.LAUNCH),
        ("cuda_driver", Category.LAUNCH),
        ("Runtime", Category.LAUNCH),
        ("cpu_op", Category.OPERATOR),
        ("Operator", Category.OPERATOR),
        ("user_annotation", Category.ANNOTATION),
        ("gpu_user_annotation", Category.DEVICE_ANNOTATION),
        ("cuda_sync", Category.OTHER),
        ("python_function", Category.OTHER),
        (None, Category.OTHER),
        (3, Category.OTHER),
    ],
)
def test_categories_of_old_and_new_profilers(text, expected):
    assert category(text) is expected


def test_sizes_of_elements():
    names = ("BFloat16", "Float", "c10::Half", "torch.int64", "Float8_e4m3fn", "Long", "odd", None)
    assert [itemsize(name) for name in names] == [2, 4, 2, 8, 1, 8, 0, 0]
