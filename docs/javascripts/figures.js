"use strict";
// What stands around the player's picture: the legend; the figures, counted beside the planner's closed forms, of
// two schedules both; and the picture as a file, with all of that in it.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make, say = (...words) => MM.say(...words), { number, percent, minus } = MM.words;

  const valueOf = (text) => { const [a, b = "1"] = text.split("/"); return Number(a) / Number(b); };

  // [label, value, remark, is bad] for one scene.
  function entries({ step, plan, v }, state) {
    const { makespan, total, ideal, peak } = plan.formulas, remark = say(step.plan.stuck ? "figure.stuck" : "figure.counted");
    const equal = (form, value) => say("figure.equal", { formula: minus(form), value });
    const bubble = (form, counted) => {
      if (!form) return remark;
      const [text, said] = form;
      return Math.abs(valueOf(said) - counted) < 1e-9 ? `= ${minus(text)}${said === text ? "" : ` = ${said}`}` : equal(text, percent(valueOf(said)));
    };
    const span = makespan ? valueOf(makespan[1]) * (state.f + state.b) : null;
    const over = state.cap ? step.peaks.filter((count) => count > state.cap * v).length : 0;
    const unit = v > 1 ? say("figure.unit", { v }) : "";
    const held = !peak ? remark : peak[1].every((count, rank) => count === step.peaks[rank]) ? `= ${minus(peak[0])}${unit}` : minus(peak[0]);
    return [
      [say("figure.step"), number(step.makespan), span === null ? remark : Math.abs(span - step.makespan) < 1e-9 ? `= ${minus(makespan[0])}` : equal(makespan[0], number(span))],
      [say("figure.total"), percent(step.overTotal), bubble(total, step.overTotal)],
      [say("figure.ideal"), percent(step.overIdeal), bubble(ideal, step.overIdeal)],
      [say("figure.peak"), step.peaks.join(" "), over ? say("figure.over", { n: over, cap: state.cap * v }) : held, over > 0],
    ];
  }

  MM.showFigures = function showFigures({ scenes, state, figures }) {
    figures.replaceChildren(...scenes.flatMap((scene) => {
      const list = make("dl", { class: "mmp-figures" });
      MM.figures(list, entries(scene, state));
      return scenes.length > 1 ? [make("h4", { class: "mmp-figurehead", "aria-level": 3 }, scene.title), list] : [list];
    }));
    if (scenes.length < 2) return;
    const [one, other] = scenes.map(({ step }) => step), names = scenes.map(({ title }) => title.split(",")[0]);
    figures.append(make("p", { class: "mmp-difference" }, say("figure.difference", { one: names[0], other: names[1], ratio: number(one.makespan / other.makespan),
      difference: number(one.makespan - other.makespan), peak: Math.max(...one.peaks) / scenes[0].v, otherPeak: Math.max(...other.peaks) / scenes[1].v })));
  };

  // Entries of the legend, of what is shown.
  MM.legendOf = function legendOf({ scene, state, shades, following, timeline }) {
    const entries = [], { letters, kinds } = scene.plan;
    for (const letter of letters) shades[letter].forEach((shade, chunk, all) => {
      const words = say(`kind.${kinds[letter].name}`);
      entries.push(MM.kindEntry(shade, all.length > 1 ? say("legend.chunk", { kind: words, chunk }) : words));
    });
    entries.push([null, "mmp-idle", say("legend.idle")], [null, "mmp-held", say("legend.held")]);
    if (scene.step.owed) entries.push([null, "mmp-owed", say("legend.owed")]);
    if (state.messages || following) entries.push([null, "mmp-transferred", say("legend.message")]);
    if (state.cap) entries.push([null, "mmp-cap", say("legend.cap", { cap: state.cap })]);
    if (state.critical) entries.push([null, "mmp-critical", say("legend.critical")]);
    if (timeline.wasDense) entries.push([null, "mmp-held", say("legend.dense")]);
    return entries;
  };

  // -- As a file, in the colours of paper, whatever the reader's scheme --

  MM.svgOf = function svgOf(player) {
    const facts = [...player.figures.querySelectorAll("h4, dl > div, p")].map((entry) => [...(entry.children.length ? entry.children : [entry])].map((part) => part.textContent).join("  "));
    const marks = { ...player.timeline.marks, t: null, hover: null, chosen: null, related: null, lines: [], faded: null, paths: player.criticalPaths() };
    const colours = MM.painters.PAPER, legend = [...player.legend.children].map((item) => ({ fill: MM.swatch(item.firstChild, colours), words: item.textContent }));
    const source = say("svg.source", { address: player.address.link(player.values()).replace(/^file:.*\//, "") });
    return MM.painters.svgFile({ view: player.view(), marks, colours, shades: player.shades, title: player.scenes.map(({ title }) => title).join(" — "), legend, lines: [...facts, source] });
  };

  MM.saveSvg = function saveSvg(player) {
    const { p, M, v } = player.state, names = player.scenes.map(({ plan, schedule }) => plan.name ?? schedule).join("-beside-");
    MM.download(`${names}-p${p}-m${M}${v > 1 ? `-v${v}` : ""}.svg`, MM.svgOf(player), "image/svg+xml");
  };

  // The colour of a legend's swatch, for a picture outside the page.
  MM.swatch = function swatch(element, colours) {
    const fill = element.style.backgroundColor;
    if (fill) return fill.startsWith("rgb") ? hex(fill) : fill;
    return { "mmp-idle": "idle", "mmp-held": colours.held, "mmp-owed": colours.owed, "mmp-transferred": colours.transfer, "mmp-critical": colours.mark, "mmp-cap": colours.over }[element.className] ?? colours.held;
  };

  const hex = (rgb) => `#${rgb.match(/\d+/g).slice(0, 3).map((value) => Number(value).toString(16).padStart(2, "0")).join("")}`;
})();
