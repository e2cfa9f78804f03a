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

  // -- What is wrong with the sizes, in sentences: each by itself, then together --

  const fields = [...form.elements].filter(({ name }) => name);
  const ruleOf = ({ min, max, step }) => ({ min: Number(min), max: Number(max), whole: step === "1" });

  function faultOf(field) {
    if (field.type !== "number") return "";
    const label = field.labels[0].firstChild.textContent, rule = ruleOf(field);
    try {
      MM.check.number(rule)(field.value);
      return "";
    } catch (error) {
      return say(field.value === "" ? "calculator.fault.none" : "calculator.fault", { label, text: field.value.replace("-", "−").slice(0, 24), why: error.message });
    }
  }

  /** What must be divided without a rest: [the sizes in question, name, value, name, value]. */
  function relations({ p, v, L, a, t, h, s, M, sp }) {
    const chunks = v > 1 ? "p × v" : "p";
    return [
      [["L", "p", "v"], "L", L, chunks, p * v],
      [["a", "t"], "a", a, "t", t],
      [["h", "a"], "h", h, "a", a],
      ...(sp ? [[["s", "t"], "s", s, "t", t]] : []),
      ...(p > 1 && v > 1 ? [[["M", "p"], "M", M, "p", p]] : []),
    ];
  }

  function faults(x) {
    const found = new Map(); // words -> names of fields
    for (const field of fields) if (faultOf(field)) found.set(faultOf(field), [field.name]);
    if (found.size) return found;
    for (const [names, one, value, other, by] of relations(x)) if (value % by) found.set(say("calculator.fault.rest", { one, value: value.toLocaleString("en"), other, by: by.toLocaleString("en") }), names);
    if (x.p === 1 && x.v > 1) found.set(say("calculator.fault.chunks", x), ["v"]);
    if (!found.size && mfu(x) > 1) found.set(say("calculator.fault.peak", { ...x, mfu: percent(mfu(x)) }), ["rate", "peak"]);
    return found;
  }

  function sizes() {
    const x = Object.fromEntries(fields.map((field) => [field.name, field.type === "number" ? Number(field.value) : field.value]));
    return { ...x, sp: form.elements.sp.checked };
  }

  const flopsOf = (x) => globalThis.MMFormulas.model_flops_per_token(x.h, x.s, x.L, x.V);
  const mfu = (x) => (x.rate * flopsOf(x)) / (x.peak * 1e12);

  function results(x) {
    const F = globalThis.MMFormulas, { sp } = x;
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
    return [
      ["total", percent(overTotal.value), overTotal.text],
      ["ideal", percent(overIdeal.value), overIdeal.text],
      ["messages", large(messages.value), messages.text],
      ["message", bytes(one)],
      ["layer", bytes(layer)],
      ["states", bytes(whole)],
      ["sharded", bytes(cut)],
      ["flops", large(flopsOf(x))],
      ["mfu", percent(mfu(x))],
    ].map(([name, value, words]) => [say(`calculator.${name}`), value, words === "0" ? say("calculator.one") : words ?? say(`calculator.${name}.of`, x)]);
  }

  // Answers to other sizes than those in the fields are grey. Returns whether they are of these.
  function show(notes = []) {
    const x = sizes(), found = faults(x), bad = new Set([...found.values()].flat()), table = form.querySelector(".mm-results"), body = table.tBodies[0];
    for (const field of fields) field.setAttribute("aria-invalid", String(bad.has(field.name)));
    table.classList.toggle("mm-stale", bad.size > 0);
    said.textContent = [...notes, ...found.keys(), ...(bad.size && body.rows.length ? [say("calculator.stale")] : [])].join(" ");
    if (bad.size) return false;
    body.replaceChildren(...results(x).map(([name, value, words]) => {
      const row = document.createElement("tr");
      for (const [tag, text] of [["th", name], ["td", value], ["td", words.replaceAll(" - ", " − ")]]) {
        const cell = row.appendChild(document.createElement(tag));
        cell.textContent = text;
        if (tag === "th") cell.scope = "row";
      }
      return row;
    }));
    return true;
  }

  // -- Its part of the address: the fields that differ from what the page came with --

  const checkOf = (field) => field.type === "checkbox" ? MM.check.flag : field.tagName === "SELECT" ? MM.check.one(() => [...field.options].map(({ value }) => value))
    : MM.check.number(ruleOf(field));
  const valueOf = (field) => field.type === "checkbox" ? Number(field.checked) : field.value;
  const given = Object.fromEntries(fields.map((field) => [field.name, valueOf(field)]));
  const address = new MM.Address("calculator", Object.fromEntries(fields.map((field) => [field.name, checkOf(field)])), false);
  const said = form.querySelector(".mm-calculator-said");

  function readAddress() {
    const { values, faults: notes } = address.read();
    for (const field of fields) {
      const value = values[field.name] ?? given[field.name];
      if (field.type === "checkbox") field.checked = Boolean(value);
      else field.value = value;
    }
    show(notes);
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    if (show()) address.write(() => Object.fromEntries(fields.filter((field) => String(valueOf(field)) !== String(given[field.name])).map((field) => [field.name, valueOf(field)])));
  });
  address.listen(readAddress);
  if (globalThis.MMFormulas) readAddress();
  else addEventListener("DOMContentLoaded", readAddress);
})();
