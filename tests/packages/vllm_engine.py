"""vLLM itself generates with a tiny random model through strobe's backend, on a CPU:

    python -m tests.packages.vllm_engine [WINDOW]

Prints a JSON list: whether each prompt's tokens are those of transformers. Needs vLLM 0.33 importable
(`pip install --no-deps vllm==0.33.0` and the packages that its imports name; no GPU).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": None,
    "initializer_range": 0.3,
}  # fmt: skip
LENGTHS, NEW = (5, 70, 1, 33, 90), 12


def install_plugins(folder: Path) -> None:
    """A distribution in `folder` whose entry points are strobe's plugin and the platform of these tests."""
    info = folder / "strobe_engine_test-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strobe-engine-test\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nhost = tests.packages.vllm_platform:name\n\n"
        "[vllm.general_plugins]\nstrobe = strobe_vllm:register\n"
    )
    sys.path.insert(0, str(folder))


def main(window: int | None) -> None:
    os.environ.update(VARIABLES)
    sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "packages/strobe-vllm/src")]
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        install_plugins(Path(folder))
        from vllm import LLM, SamplingParams

        torch.manual_seed(0)
        config = MistralConfig(**SIZES, sliding_window=window) if window else LlamaConfig(**SIZES)
        model = (MistralForCausalLM if window else LlamaForCausalLM)(config).float().eval()
        path = f"{folder}/{config.model_type}"
        model.save_pretrained(path)
        engine = LLM(
            path, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256, block_size=16,
            attention_backend="CUSTOM", max_num_seqs=4, max_num_batched_tokens=64, enable_chunked_prefill=True,
            compilation_config={"custom_ops": ["none"]},
        )  # fmt: skip
        draw = lambda n: torch.randint(1, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        prompts = [draw(n) for n in LENGTHS]
        sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
        found = []
        for prompt, output in zip(prompts, outputs):
            own = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
            found.append(list(output.outputs[0].token_ids) == own[0, len(prompt) :].tolist())
        print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
