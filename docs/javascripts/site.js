"use strict";
// Small things on pages: names that may break, and the calculator on the page of formulas.

// The theme gives its search dialog no name to read out.
document.querySelector('.md-search[role="dialog"]')?.setAttribute("aria-label", MM.say("search.name"));

// Long names may break after a dot or an underscore.
for (const code of document.querySelectorAll(":is(h1, h2, h3, td) code, h1, h2, h3"))
  for (const text of [...code.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE && /\w[._]\w/.test(node.data)))
    text.replaceWith(...text.data.split(/(?<=\w[._])(?=\w)/).flatMap((part, place) => (place ? [document.createElement("wbr"), part] : [part])));

(() => {
  const form = document.getElementById("mm-calculator");
  if (!form) return;

  const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const bytes = (n) => {
    let unit = 0;
    for (; n >= 1024 && unit < UNITS.length - 1; unit += 1) n /= 1024;
    return `${+n.toPrecision(3)} ${UNITS[unit]}`;
  };
  const percent = (x) => `${(100 * x).toFixed(1)}%`;
  const large = (n) => n.toLocaleString("en", { maximumSignificantDigits: 3, notation: "compact" });

  function results() {
    const x = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, +value || value]));
    const F = globalThis.MMFormulas;
    const sp = Boolean(x.sp);
    const config = {
      schedule: x.p === 1 ? "no-pipelining" : x.v > 1 ? "interleaved" : "1f1b",
      pp_size: x.p, num_microbatches: x.M, num_model_chunks: x.p === 1 ? 1 : x.v,
    };
    const [overIdeal, overTotal] = F.bubble_formulas(config);
    const messages = F.message_formula(config);
    const layer = F.activation_bytes_per_layer(x.s, x.b, x.h, x.a, x.t, 1, sp, x.recompute);
    const one = F.message_bytes(x.s, x.b, x.h, x.t, 1, sp);
    const parameters = (x.L * F.num_layer_parameters(x.h)) / (x.t * x.p);
    const whole = F.model_state_bytes(parameters, 2, 4).total;
    const cut = F.model_state_bytes(parameters, 2, 4, x.d, true).total;
    const flops = F.model_flops_per_token(x.h, x.s, x.L, x.V);
    return [
      ["idle / total", percent(overTotal.value), overTotal.text],
      ["idle / computing", percent(overIdeal.value), overIdeal.text],
      ["messages each way, per step", large(messages.value), messages.text],
      ["one message, per rank", bytes(one), "activation or gradient, 16 bits wide"],
      ["activations of one layer and microbatch, per rank", bytes(layer), `recompute ${x.recompute}`],
      ["weights, gradients, optimizer, per rank", bytes(whole), "bf16, fp32 gradients"],
      ["the same, distributed optimizer", bytes(cut), `over d = ${x.d}`],
      ["operations per token", large(flops), "forward and backward, whole model"],
      ["MFU", percent((x.rate * flops) / (x.peak * 1e12)), "of one GPU's peak"],
    ];
  }

  function show() {
    const body = form.querySelector("tbody");
    if (!form.checkValidity()) return;
    body.replaceChildren(...results().map(([name, value, words]) => {
      const row = document.createElement("tr");
      for (const [tag, text] of [["th", name], ["td", value], ["td", words.replaceAll(" - ", " − ")]]) {
        const cell = row.appendChild(document.createElement(tag));
        cell.textContent = text;
        if (tag === "th") cell.scope = "row";
      }
      return row;
    }));
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", show);
  if (globalThis.MMFormulas) show();
  else addEventListener("DOMContentLoaded", show);
})();
