"use strict";
// The calculator on the page of formulas. The formulas are formulas.js, translated from the package's own.

(() => {
  const MM = globalThis.MM, { say } = MM, form = document.getElementById("mm-calculator");
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
      pp_size: x.p, num_microbatches: x.M, num_model_chunks: x.p === 1 ? 1 : x.v, message_sizes: null,
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
      ["total", percent(overTotal.value), overTotal.text],
      ["ideal", percent(overIdeal.value), overIdeal.text],
      ["messages", large(messages.value), messages.text],
      ["message", bytes(one)],
      ["layer", bytes(layer)],
      ["states", bytes(whole)],
      ["sharded", bytes(cut)],
      ["flops", large(flops)],
      ["mfu", percent((x.rate * flops) / (x.peak * 1e12))],
    ].map(([name, value, words]) => [say(`calculator.${name}`), value, words ?? say(`calculator.${name}.of`, x)]);
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

  // -- Its part of the address: the fields that differ from what the page came with --

  const fields = [...form.elements].filter(({ name }) => name);
  const checkOf = (field) => field.type === "checkbox" ? MM.check.flag : field.tagName === "SELECT" ? MM.check.one(() => [...field.options].map(({ value }) => value))
    : MM.check.number({ min: field.min === "" ? -Infinity : Number(field.min), max: field.max === "" ? 1e15 : Number(field.max), whole: (field.step || "1") === "1" });
  const valueOf = (field) => field.type === "checkbox" ? Number(field.checked) : field.value;
  const given = Object.fromEntries(fields.map((field) => [field.name, valueOf(field)]));
  const address = new MM.Address("calculator", Object.fromEntries(fields.map((field) => [field.name, checkOf(field)])), false);
  const said = form.parentElement.insertBefore(Object.assign(document.createElement("p"), { className: "mm-calculator-said", role: "status" }), form);

  function readAddress() {
    const { values, faults } = address.read();
    for (const field of fields) {
      const value = values[field.name] ?? given[field.name];
      if (field.type === "checkbox") field.checked = Boolean(value);
      else field.value = value;
    }
    said.textContent = faults.join(" ");
    show();
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    said.textContent = "";
    show();
    if (form.checkValidity()) address.write(() => Object.fromEntries(fields.filter((field) => String(valueOf(field)) !== String(given[field.name])).map((field) => [field.name, valueOf(field)])));
  });
  address.listen(readAddress);
  if (globalThis.MMFormulas) readAddress();
  else addEventListener("DOMContentLoaded", readAddress);
})();
