"""decode_attention's torch implementation against a loop in float64."""

import pytest
import torch

from engine.kernels import decode_attention
from tests.engine.kernels.oracle import attention_in_float64, ragged_cache


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("extras", [{}, {"window": 5}, {"window": 9, "softcap": 2.0}, {"softcap": 2.0}])
def test_matches_a_loop_in_float64(heads: tuple[int, int], extras: dict) -> None:
    case = ragged_cache(*heads, width=12, lengths=[1, 7, 0, 23], capacity=24, **extras)
    torch.testing.assert_close(decode_attention(**case), attention_in_float64(**case).float(), atol=1e-6, rtol=0)
