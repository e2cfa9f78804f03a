"""Modules that have other names: old ones, and those of Megatron that stand elsewhere here.

Counterpart: Megatron has none; it keeps a file that imports everything from the new place.

`left_out.OurModules` asks for a name that no file has. The old name and the new one are then the same
module. A program without old names does not load this file.
"""

import importlib
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "backend.checks": "backend.calls",
    "backend.connecting": "backend.mesh",
    "backend.epochs": "backend.incoming",
    "backend.futures": "backend.works",
    "backend.registering": "backend.group",
    "backend.shared_memory": "backend.slots",
    "commands.convert": "commands.convert_command",
    "commands.exercises": "commands.exercises_command",
    "commands.groups": "commands.groups_command",
    "commands.layout": "commands.layout_command",
    "commands.notebooks": "commands.notebooks_command",
    "commands.plan": "commands.plan_command",
    "commands.preprocess": "commands.preprocess_command",
    "commands.trace": "commands.trace_command",
    "core.batch_rampup": "core.batch_sizes",
    "core.call_attributes": "core.tracing",
    "core.datasets.index_cache": "core.datasets.megatron_dataset",
    "core.device": "core.utils",
    "core.distributed.setup_checks": "core.optimizer.optimizer_setup",
    "core.distributed.stage_placement": "core.transformer.stages_as_told",
    "core.local_backlog": "backend.backlog",
    "core.local_channels": "backend.channels",
    "core.local_collectives": "backend.mesh",
    "core.local_handshake": "backend.handshake",
    "core.local_host.backlog": "backend.backlog",
    "core.local_host.channels": "backend.channels",
    "core.local_host.connecting": "backend.mesh",
    "core.local_host.handshake": "backend.handshake",
    "core.local_host.local_collectives": "backend.mesh",
    "core.local_host.shared_memory": "backend.slots",
    "core.local_host.slots": "backend.slots",
    "core.local_memory": "backend.slots",
    "core.local_slots": "backend.slots",
    "core.models.common.language_module.language_module_checks": "core.transformer.layer_checks",
    "core.models.gpt.gpt_mtp_spec": "core.models.gpt.gpt_second_subjects",
    "core.models.gpt.gpt_schedule_plan": "core.models.gpt.gpt_second_subjects",
    "core.optimizer.grad_scaler_state": "core.optimizer.optimizer_state",
    "core.optimizer.zeros_in_grads": "core.optimizer.optimizer_state",
    "core.pipeline_parallel.interleaved": "core.pipeline_parallel.schedules",
    "core.pipeline_parallel.lowering": "core.orders.lowering",
    "core.pipeline_parallel.mean_loss": "core.pipeline_parallel.user_results",
    "core.pipeline_parallel.model_chunk": "core.pipeline_parallel.steps",
    "core.pipeline_parallel.no_frame": "core.pipeline_parallel.failed_step",
    "core.pipeline_parallel.order_check": "core.orders.order_check",
    "core.pipeline_parallel.orders": "core.orders.orders",
    "core.pipeline_parallel.placement": "core.orders.placement",
    "core.pipeline_parallel.planned_schedule": "core.orders.planned_schedule",
    "core.pipeline_parallel.runnable": "core.orders.runnable",
    "core.pipeline_parallel.send_limits": "core.orders.send_limits",
    "core.pipeline_parallel.transport": "core.pipeline_parallel.p2p_communication",
    "core.pipeline_parallel.work": "core.orders.work",
    "core.rerun.injector": "core.rerun.verdicts",
    "core.rerun.large_values": "core.rerun.states",
    "core.rerun.machine_state": "core.rerun.verdicts",
    "core.rerun.tracker": "core.rerun.states",
    "core.straggler_times": "core.straggler_detector",
    "core.tensor_parallel.kept_rng_states": "core.tensor_parallel.megatron_methods",
    "core.tensor_parallel.linear_checks": "core.tensor_parallel.shape_checks",
    "core.tensor_parallel.owing_linear": "core.tensor_parallel.weight_grad_store",
    "core.tensor_parallel.rng_checks": "core.tensor_parallel.shape_checks",
    "core.tensor_parallel.symbolic_region": "core.tensor_parallel.megatron_methods",
    "core.tensor_parallel.tensor_to_send": "core.tensor_parallel.shape_checks",
    "core.transformer.attention_checks": "core.transformer.layer_checks",
    "core.transformer.context_parallel_config": "core.transformer.activation_config",
    "core.transformer.delayed_wgrad": "core.tensor_parallel.weight_grad_store",
    "core.transformer.global_names": "core.transformer.module_state",
    "core.transformer.late_fields": "core.transformer.second_subjects",
    "core.transformer.layer_placement_checks": "core.transformer.layer_checks",
    "core.transformer.layers_of_rank": "core.transformer.layer_parts",
    "core.transformer.moe.layer_words": "core.transformer.moe_config",
    "core.transformer.moe.moe_config": "core.transformer.moe_config",
    "core.transformer.mtp_placement": "core.transformer.stages_as_told",
    "core.transformer.recompute_config": "core.transformer.activation_config",
    "core.transformer.rope_checks": "core.transformer.layer_checks",
    "core.transformer.spec_arguments": "core.transformer.layer_parts",
    "core.transformer.submodules": "core.transformer.layer_parts",
    "core.transformer.transformer_config_checks": "core.transformer.layer_checks",
    "doctor.case": "doctor.wait_graph",
    "doctor.verdict": "doctor.findings",
    "doctor.words": "doctor.advice",
    "execution": "training.pipeline_schedule",
    "exercises.alone_side": "exercises.room.alone_side",
    "exercises.bench_counting": "exercises.bench.counted_collectives",
    "exercises.bench_gpt": "exercises.bench.gpt_step",
    "exercises.bench_gpt_judge": "exercises.bench.gpt_step_judge",
    "exercises.bench_rendezvous": "exercises.bench.untagged_messages",
    "exercises.bench_schedule": "exercises.bench.schedule_of_order",
    "exercises.bench_sent": "exercises.bench.sent_bytes",
    "exercises.beside": "exercises.student.beside",
    "exercises.cases": "exercises.bench.cases",
    "exercises.collect": "exercises.room.collect",
    "exercises.engine": "exercises.check.engine",
    "exercises.fault": "exercises.labs.fault",
    "exercises.faults": "exercises.labs.faults",
    "exercises.faults_around_a_step": "exercises.labs.faults_around_a_step",
    "exercises.faults_of_orders": "exercises.labs.faults_of_orders",
    "exercises.feedback": "exercises.bench.feedback",
    "exercises.feedback_numbers": "exercises.bench.feedback_numbers",
    "exercises.grading.source_text": "exercises.grading.decoded_text",
    "exercises.integrity": "exercises.room.integrity",
    "exercises.judge": "exercises.check.judge",
    "exercises.lab_side": "exercises.labs.lab_side",
    "exercises.noting": "exercises.bench.noting",
    "exercises.on_ranks": "exercises.room.on_ranks",
    "exercises.pages": "exercises.student.pages",
    "exercises.pipes": "exercises.room.pipes",
    "exercises.plain_data": "exercises.room.plain_data",
    "exercises.plain_text": "exercises.room.plain_text",
    "exercises.rank_side": "exercises.room.rank_side",
    "exercises.recording": "exercises.bench.recorded_run",
    "exercises.replacing": "exercises.bench.replacing",
    "exercises.runner": "exercises.check.runner",
    "exercises.source": "exercises.room.reading",
    "exercises.stand_ins": "exercises.room.stand_ins",
    "exercises.student_folder": "exercises.student.student_folder",
    "exercises.torchrun": "exercises.check.torchrun",
    "exercises.verdict": "exercises.room.verdict",
    "exercises.watching": "exercises.student.watch_files",
    "late_modules": "exports",
    "launcher": "launching.launcher",
    "packing": "launching.packing",
    "planner.check": "planner.plan_check",
    "planner.report": "planner.plan_report",
    "planner.schedules": "planner.written_loops",
    "planner.transport": "planner.imagined_transport",
    "planner.written_schedules": "planner.written_loops",
    "tiny_gpt": "training.tiny_gpt",
    "tracing.convert": "tracing.to_events",
    "tracing.report": "tracing.step_report",
    "tracing.source_text": "tracing.recorded_source",
    "tracing.words": "tracing.trace_words",
    "training.data_checks": "training.families.family_checks",
    "training.datasets.end_of_data": "training.datasets.data_samplers",
    "training.datasets.label_check": "training.result_checks",
    "training.from_last_stage": "training.progress",
    "training.old_flags": "training.older_arguments",
    "training.rendezvous": "training.process_group",
    "training.rerun_args": "training.argument_checks",
    "training.terminal_lines": "core.output",
    "user_file": "launching.user_file",
}
"""Old module -> new module, both below `minimegatron`.

Programs, notebooks and students' files that import the old one keep working."""

FOLDERS = {"core.local_host"}
"""Old packages, empty now: what was in them has moved."""

ELSEWHERE = {
    "core.models.common.embeddings.rope_utils": "core.transformer.rope_utils",
}
"""Megatron's module -> ours, where ours stands in another room."""


BEFORE_CORE = {
    "mpu": (
        "groups are in minimegatron.core.parallel_state, broadcast_data and the parallel layers in "
        "minimegatron.core.tensor_parallel"
    ),
    "model": "models are in minimegatron.core.models, their layers in minimegatron.core.transformer",
    "data": "data sets are in minimegatron.core.datasets",
    "optimizer": "import minimegatron.core.optimizer",
    "schedules": "import minimegatron.core.pipeline_parallel.schedules",
    "p2p_communication": "import minimegatron.core.pipeline_parallel.p2p_communication",
    "tokenizer": "import minimegatron.training.tokenizer",
    "learning_rates": "import minimegatron.core.optimizer_param_scheduler",
    "microbatches": "import minimegatron.core.num_microbatches_calculator",
    **{
        name: f"import minimegatron.training.{name}"
        for name in ("arguments", "checkpointing", "global_vars", "initialize", "utils")
    },
    **{
        name: f"from minimegatron.training import {name}"
        for name in ("get_args", "get_timers", "get_tokenizer", "print_rank_0", "print_rank_last")
    },
}
"""What texts import from `megatron` that were written before Megatron Core -> where it is today."""


def new_file(file: str) -> str:
    """Where the code of a file of the package is now; other paths stay as they are.

    >>> new_file("minimegatron/launcher.py"), new_file("minimegatron/core/utils.py")
    ('minimegatron/launching/launcher.py', 'minimegatron/core/utils.py')
    """
    before, package, rest = file.rpartition("minimegatron/")
    old = rest.removesuffix(".py").replace("/", ".")
    return f"{before}{package}{MOVED[old].replace('.', '/')}.py" if old in MOVED else file


def spec_of_old(fullname: str) -> ModuleSpec | None:
    """How to import the module that has an old name; None for a name that no module ever had.

    Raises ModuleNotFoundError, with today's name, for what was there before Megatron Core.
    """
    package, _, old = fullname.partition(".")
    if package == "minimegatron" and old in BEFORE_CORE:
        raise ModuleNotFoundError(
            f"{fullname} is a name of before Megatron Core; today: {BEFORE_CORE[old]}"
        )
    if package == "minimegatron" and old in FOLDERS:
        return ModuleSpec(fullname, _NoFiles(), is_package=True)
    is_known = package == "minimegatron" and (old in MOVED or old in ELSEWHERE)
    return ModuleSpec(fullname, _NewModule()) if is_known else None


class _NoFiles(Loader):
    def exec_module(self, module: ModuleType) -> None:
        """Each module in it is found by itself."""


class _NewModule(Loader):
    def exec_module(self, module: ModuleType) -> None:
        # Python hands out what stands in `sys.modules` afterwards.
        old = module.__name__.removeprefix("minimegatron.")
        new = MOVED.get(old) or ELSEWHERE[old]
        sys.modules[module.__name__] = importlib.import_module(f"minimegatron.{new}")
