"use strict";
// The calculator on the page of costs. The formulas are formulas.js, translated from the package's own.

(() => {
  const MM = globalThis.MM, { say } = MM, form = document.getElementById("mm-calculator");
  if (!form) return;

  const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const bytes = (n) => {
    let unit = 0;
    for (; n >= 1024 && unit < UNITS.length - 1; unit += 1) n /= 1024;
    return `${+n.toPrecision(3)} ${UNITS[unit]}`;
  };
  const decimal = (n) => {
    let unit = 0;
    for (; n >= 1000 && unit < 4; unit += 1) n /= 1000;
    return `${+n.toPrecision(3)} ${["bytes", "kB", "MB", "GB", "TB"][unit]}`;
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
  function relations({ p, v, L, a, t, h, s, c, d, e, E, M, sp }) {
    const chunks = v > 1 ? "p × v" : "p";
    return [
      [["L", "p", "v"], "L", L, chunks, p * v],
      [["a", "t"], "a", a, "t", t],
      [["h", "a"], "h", h, "a", a],
      ...(c > 1 ? [[["s", "c"], "s", s, "2 × c", 2 * c]] : []),
      ...(sp ? [[["s", "t"], "s", s, c > 1 ? "c × t" : "t", c * t]] : []),
      ...(E > 0 ? [[["E", "e"], "E", E, "e", e], [["d", "e"], "t × c × d", t * c * d, "e", e]] : []),
      ...(p > 1 && v > 1 ? [[["M", "p"], "M", M, "p", p]] : []),
    ];
  }

  function faults(x) {
    const found = new Map(); // words -> names of fields
    for (const field of fields) if (faultOf(field)) found.set(faultOf(field), [field.name]);
    if (found.size) return found;
    for (const [names, one, value, other, by] of relations(x)) if (value % by) found.set(say("calculator.fault.rest", { one, value: value.toLocaleString("en"), other, by: by.toLocaleString("en") }), names);
    if (x.E === 0 && x.e > 1) found.set(say("calculator.fault.experts", x), ["e"]);
    if (x.E > 0 && x.t > 1 && !x.sp) found.set(say("calculator.fault.sequence", x), ["sp", "t"]);
    if (x.E > 0 && x.k > x.E) found.set(say("calculator.fault.choice", x), ["k"]);
    if (x.p === 1 && x.v > 1) found.set(say("calculator.fault.chunks", x), ["v"]);
    if (!found.size && mfu(x) > 1) found.set(say("calculator.fault.peak", { ...x, mfu: percent(mfu(x)) }), ["rate", "peak"]);
    return found;
  }

  function sizes() {
    const x = Object.fromEntries(fields.map((field) => [field.name, field.type === "number" ? Number(field.value) : field.value]));
    return { ...x, sp: form.elements.sp.checked };
  }

  const flopsOf = (x) => globalThis.MMFormulas.model_flops(x);
  const mfu = (x) => (x.rate * flopsOf(x)) / (x.peak * 1e12);

  function results(x) {
    const F = globalThis.MMFormulas, { sp } = x;
    const config = {
      schedule: x.p === 1 ? "no-pipelining" : x.v > 1 ? "interleaved" : "1f1b",
      pp_size: x.p, num_microbatches: x.M, num_model_chunks: x.p === 1 ? 1 : x.v, message_sizes: null,
    };
    const [overIdeal, overTotal] = F.bubble_formulas(config);
    const messages = F.message_formula(config);
    const layer = F.layer_activation_bytes(x, x.recompute);
    const one = F.stage_bytes(x);
    const parameters = F.dense_parameters(x, true) + F.expert_parameters(x);
    const whole = F.model_state_bytes(parameters, 2, 4).total;
    const step = F.step_seconds(x), layers = x.M * F.layers_of_rank(x), held = F.held_bytes(x), run = measuredRun(x);
    const part = (seconds) => percent(seconds / step);
    return [
      ["total", percent(overTotal.value), overTotal.text],
      ["ideal", percent(overIdeal.value), overIdeal.text],
      ["messages", large(messages.value), messages.text],
      ["message", bytes(one)],
      ["layer", bytes(layer)],
      ["states", bytes(whole)],
      ["sharded", bytes(F.state_bytes(x, true))],
      ["held", decimal(held), say(held > x.memory * 1e9 ? "calculator.held.more" : "calculator.held.of", { share: percent(held / (x.memory * 1e9)), memory: x.memory })],
      ...(run ? [["measured", decimal(run.measured), say("calculator.measured.of", { off: percent(held / run.measured - 1).replace("-", "−") })]] : []),
      ["step", `${+step.toPrecision(3)} s`, say("calculator.step.of", { share: percent(F.useful_share(x)) })],
      ["moved", part(layers * F.moving_seconds(x)), say("calculator.moved.of", { t: part(layers * F.tensor_seconds(x)), c: part(layers * F.context_seconds(x)), e: part(layers * F.expert_seconds(x)) })],
      ["copies", part(F.copies_seconds(x))],
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

  // -- Runs that were measured: one fills the fields in, and stands beside the estimate --

  const runs = JSON.parse(form.querySelector(".mm-measured-runs").textContent), chosen = form.querySelector(".mm-measured");
  const ofModel = ["L", "h", "a", "V", "s", "m", "E", "t", "p", "v", "c", "d", "e", "b", "M", "recompute", "sp"];
  const ofExperts = ["k", "f"];

  /** The run that has these sizes, but for those of the machine. */
  function measuredRun(x) {
    return Object.values(runs).find((run) => ofModel.every((name) => run[name] === x[name]) && (x.E === 0 || ofExperts.every((name) => run[name] === x[name])));
  }

  chosen.addEventListener("change", () => {
    const run = runs[chosen.value];
    if (!run) return;
    for (const field of fields) {
      if (field.type === "checkbox") field.checked = run[field.name];
      else if (ofModel.includes(field.name) || (run.E > 0 && ofExperts.includes(field.name))) field.value = run[field.name];
    }
    form.dispatchEvent(new Event("input"));
  });

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
