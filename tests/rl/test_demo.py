"""What judges `make demo MODEL=rl`; and, in `make test-full`, that three seeds learn to sort."""

import sys

import pytest

from minimegatron.rl import demo

pytestmark = pytest.mark.processes

SAYS = "import sys; by_lot = '--rl-shuffle-rewards' in sys.argv; print({} if by_lot else {})"


def summary(exact, held_out):
    return f" exact answers {exact:.3f} (mean of the last 20 rollouts), held-out {held_out:.3f}"


@pytest.mark.parametrize(
    ("learned", "control", "code", "words"),
    [
        ((0.8, 0.7), (0.05, 0.0), 0, "It learned from its rewards"),
        ((0.799, 0.9), (0.0, 0.0), 1, "exact answers 0.799 are below 0.8"),
        ((0.9, 0.69), (0.0, 0.0), 1, "held-out answers 0.690 are below 0.7"),
        ((0.9, 0.9), (0.06, 0.0), 1, "the control's 0.060 are above 0.05"),
    ],
)
def test_the_verdict(learned, control, code, words, capfd):
    program = SAYS.format(repr(summary(*control)), repr(summary(*learned)))
    assert demo.main(["A_SETTING=1", sys.executable, "-c", program]) == code
    assert words in capfd.readouterr().out


def test_a_run_that_fails_is_no_verdict(capfd):
    assert demo.main([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert demo.main([sys.executable, "-c", "print('nothing')"]) == 1
    assert "It learned" not in capfd.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_three_digits_are_sorted(seed):
    command = [sys.executable, "-m", "minimegatron.train_rl", *FLAGS.split(), "--seed", str(seed)]
    assert demo.main(command) == 0


FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 64 --global-batch-size 256 "
    "--grpo-prompts-per-step 32 --grpo-group-size 8 --grpo-clamp-eps-lower 0.2 "
    "--grpo-clamp-eps-upper 0.2 --lr 1e-3 --lr-decay-style constant --train-iters 200 "
    "--log-interval 40"
)
