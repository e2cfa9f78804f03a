"""The marks of a parameter belong to its place in the model: another parameter there gets them too.

`core.parameter` lists the marks. Torch knows nothing of them. `load_state_dict(assign=True)`,
`to_empty` of a model built on the device "meta", `copy.deepcopy` and an assignment
`layer.weight = torch.nn.Parameter(...)` put a new parameter there, without any mark. Taken as it is,
a piece would count as a whole, an expert as dense, a partial gradient as complete.

So a layer notes its parameters' marks when it is built, a model those that it has added; and who reads
marks restores them first: data-parallel wrapper, optimizer, checkpoint. Megatron has no counterpart;
there such a parameter goes without.
"""

import torch


def note_marks(model: torch.nn.Module) -> None:
    """Each module inside notes the attributes of its own parameters. The last line of a constructor."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if vars(param) and not hasattr(param, "main_grad"):  # wrapped, it is long since noted
                param.has_its_marks = True
                notes = module.__dict__.setdefault("marks_of_parameters", {})
                notes[name] = dict(vars(param))


def mark_expert_parameters(layer: torch.nn.Module, is_expert: bool) -> None:
    """Says of an expert's parameters that they are of the kind `expert` (see `core.parameter`).

    Where experts are cut over the same ranks as everything else they are parameters like others. It is
    a linear layer's last mark: all are noted then.
    """
    config = layer.config
    is_cut_as_others = (
        config.expert_model_parallel_size == 1
        and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
    )
    if is_expert and not is_cut_as_others:
        for param in layer.parameters(recurse=False):
            param.allreduce = False
    note_marks(layer)


def restore_marks(model: torch.nn.Module) -> None:
    """Parameters that came in the place of others get what was noted there; others stay as they are.

    Raises ValueError for a place where torch computes the weight from other parameters, as
    `torch.nn.utils.parametrize` does: nobody knows how these are cut.
    """
    for prefix, module in model.named_modules():
        for name, noted in vars(module).get("marks_of_parameters", {}).items():
            param = getattr(module, name, None)
            if isinstance(param, torch.nn.Parameter):
                if not hasattr(param, "has_its_marks"):
                    vars(param).update(noted)
            elif param is not None:
                raise ValueError(
                    f"{prefix}.{name} of shape {tuple(param.shape)} is computed from other parameters, "
                    "for which nothing says how they are cut and whose gradients are summed; remove "
                    "what computes it (a parametrization, such as weight_norm) and train the weight"
                )
