"use strict";
// The replay: a recorded run, call by call. What `minimegatron trace` knows of it was put into
// recordings/NAME.js when the site was built (docs/tools/emit_player.py): times, gaps and their reasons,
// messages, the plan at the run's own speed. Nothing is worked out here but what to show.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make;
  const PHASES = { warmup: "warm-up", steady: "steady state", cooldown: "cool-down" };
  const ACTIONS = ["forward", "backward", "communicate"];
  const LETTERS = { forward: "F", backward: "B" };

  const ms = (us) => {
    const value = us / 1000, size = Math.abs(value);
    return `${value.toFixed(size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3)} ms`;
  };

  MM.mountReplay = async function mountReplay(root, options) {
    const replay = new Replay(root, options);
    root.mmReplay = replay;
    await replay.open(replay.wanted.get("recording") || options.recording || Object.keys(MM.links.recordings)[0]);
    return replay;
  };

  const pretty = (words) => words.replaceAll("->", "→").replaceAll("<-", "←").replaceAll(" x ", " × ");

  async function load(name) {
    if (!(name in MM.links.recordings)) throw new Error(`there is no recording ${name}`);
    await MM.load(`recordings/${name}.js`);
    const data = await MM.engine.unpack(MM.packed[`recording ${name}`]);
    data.words = data.words.map(pretty);
    return data;
  }

  class Replay {
    constructor(root, options) {
      this.root = root;
      this.options = options;
      this.wanted = new URLSearchParams(options.hasAddress ? location.hash.slice(1) : "");
      this.build();
    }

    build() {
      this.names = make("select", { onchange: () => this.open(this.names.value) },
        ...Object.entries(MM.links.recordings).map(([name, title]) => make("option", { value: name }, title)));
      this.steps = make("select", { onchange: () => this.openStep(Number(this.steps.value)) });
      this.stepsField = make("label", { class: "mmp-field" }, make("span", {}, "Pipeline"), this.steps);
      this.grain = make("select", { onchange: () => this.list() },
        make("option", { value: "action" }, "forwards, backwards, messages"), make("option", { value: "call" }, "every recorded call"));
      this.showPlan = make("input", { type: "checkbox", checked: true, onchange: () => this.draw() });
      this.showMessages = make("input", { type: "checkbox", onchange: () => this.mark() });
      this.timeline = new MM.Timeline({
        label: "Timeline of the recorded run", describe: (id) => this.describe(id), choose: (id) => this.chosen(id),
        keys: { " ": () => this.clock.toggle(this.timeline.marks.t), ".": () => this.stepBy(1), ",": () => this.stepBy(-1), Enter: () => this.stacks.focus() },
      });
      this.clock = new MM.Clock({ span: () => this.step.length, next: (t) => this.calls.find((c) => c.event.s > t + 0.01)?.event.s ?? this.step.length,
        tick: (t) => this.seek(t), changed: () => {} });
      this.clock.seconds = 30;
      this.transport = MM.transport({ clock: this.clock, seek: (t) => this.seek(t), step: (direction) => this.stepBy(direction) });
      this.transport.now = () => this.timeline.marks.t;
      this.figures = make("dl", { class: "mmp-figures" });
      this.badge = make("p", {});
      this.legend = make("ul", { class: "mmp-legend", "aria-label": "Legend" });
      this.why = make("section", { class: "mmp-details", "aria-label": "Details of the run", "aria-live": "polite" });
      this.stacks = make("div", { class: "mmp-stacks", tabindex: "-1", role: "group", "aria-label": "What each rank is doing" });
      this.flights = make("ul", { class: "mmp-flights" });
      this.table = make("div", { class: "mmp-table", tabindex: "0", role: "region", "aria-label": "Table of the run" });
      this.twin = make("details", { class: "mmp-twin", ontoggle: () => this.drawTable() }, make("summary", {}, "The same as a table"), this.table);
      this.source = make("div", { class: "mmp-source" });
      const field = (label, control) => make("label", { class: "mmp-field" }, make("span", {}, label), control);
      this.root.replaceChildren(make("div", { class: "mmp" },
        make("div", { class: "mmp-controls" }, field("Recording", this.names), this.stepsField, field("Step through", this.grain),
          make("label", { class: "mmp-switch" }, this.showPlan, " Plan, thin"), make("label", { class: "mmp-switch" }, this.showMessages, " All messages")),
        this.badge, this.timeline.element, this.transport.element, this.legend, this.figures, this.why,
        this.stacks, make("p", { class: "mmp-head" }, "Messages on their way"), this.flights, this.twin, this.source, this.timeline.help));
    }

    async open(name) {
      this.clock.pause();
      this.name = name;
      this.data = await load(name);
      this.names.value = name;
      this.steps.replaceChildren(...this.data.steps.map((step, number) => make("option", { value: number }, step.label)));
      this.stepsField.hidden = this.data.steps.length < 2;
      this.showSource();
      this.openStep(Math.min(Number(this.wanted.get("pipeline")) || 0, this.data.steps.length - 1));
    }

    openStep(number) {
      this.number = number;
      this.steps.value = String(number);
      this.step = this.data.steps[number];
      this.shades = { F: this.step.colours.forward, B: this.step.colours.backward };
      this.byIndex = this.step.ranks.map((rank) => new Map(rank.events.map((event) => [event.i, event])));
      Object.assign(this.timeline.marks, { t: null, chosen: null });
      this.badge.replaceChildren(...(this.step.paced ? [make("span", { class: "mmp-badge" }, this.step.paced)] : []));
      this.badge.hidden = !this.step.paced;
      this.figures.replaceChildren(...this.step.figures.map((entry) => make("div", { class: entry.bad ? "mmp-bad" : null },
        make("dt", {}, entry.label), make("dd", { class: "mmp-value" }, entry.value), make("dd", { class: "mmp-remark" }, entry.remark.replaceAll(" - ", " − ")))));
      this.list();
      this.draw();
      this.showLegend();
      const { wanted } = this;
      this.wanted = new URLSearchParams();
      if (wanted.has("call")) this.goTo(this.calls.findIndex((c) => `${c.rank}:${c.event.i}` === wanted.get("call")));
      else this.seek(0.42 * this.step.length);
      if (this.twin.open) this.drawTable();
    }

    // What is stepped through, in the order in which it began on any rank.
    list() {
      const isAction = this.grain.value === "action";
      this.calls = this.step.ranks.flatMap((owner, rank) => owner.events
        .filter((event) => !isAction || ACTIONS.includes(event.k)).map((event) => ({ rank, event })))
        .sort((a, b) => a.event.s - b.event.s || a.rank - b.rank);
    }

    // -- Timeline --

    draw() {
      const { step } = this;
      this.timeline.set({
        rows: step.ranks.map((owner, rank) => ({
          name: `stage ${rank}`, note: `rank ${owner.rank}`,
          bars: owner.events.filter((e) => e.k in LETTERS).map((e) => ({ s: e.s, l: e.l, kind: LETTERS[e.k], chunk: e.c, mb: e.m, id: `${rank}:${e.i}` })),
          gaps: owner.gaps.map((gap, place) => ({ s: gap.s, l: gap.l, id: `${rank}:g${place}` })),
          transfers: owner.events.filter((e) => e.t && !ACTIONS.includes(e.k)).map((e) => ({ s: e.s + e.l - e.t, l: e.t })),
          plan: this.showPlan.checked ? owner.plan.map((bar) => ({ ...bar, kind: LETTERS[bar.k], chunk: bar.c })) : undefined,
        })),
        span: step.length, v: step.chunks, most: 0, cap: 0, words: (us) => `${Number((us / 1000).toPrecision(6))}${us ? "" : " ms"}`,
      }, this.shades);
    }

    showLegend() {
      const entries = [];
      for (const kind of ["F", "B"])
        this.shades[kind].forEach(([fill], chunk) => entries.push([`background:${fill}`, null, (kind === "F" ? "forward" : "backward") + (this.step.chunks > 1 ? `, chunk ${chunk}` : "")]));
      entries.push([null, "mmp-idle", "waiting"], [null, "mmp-transferred", "transfer"], [null, "mmp-thin", "thin: the plan at this run's speed, messages free"]);
      this.legend.replaceChildren(...entries.map(([style, css, words]) => make("li", {}, make("i", { style, class: css }), words)));
    }

    nameOf(event) {
      if (event.k in LETTERS) return `${LETTERS[event.k]}${event.m}${this.step.chunks > 1 ? ` of chunk ${event.c}` : ""}`;
      return event.a || this.data.functions[event.f][0];
    }

    event(id) {
      const [rank, rest] = id.split(":");
      return rest[0] === "g" ? { rank: Number(rank), gap: this.step.ranks[rank].gaps[Number(rest.slice(1))] }
        : { rank: Number(rank), event: this.byIndex[rank].get(Number(rest)) };
    }

    describe(id) {
      const { rank, event, gap } = this.event(id);
      if (gap) return { title: `Stage ${rank} computes nothing for ${ms(gap.l)}`, lines: [gap.x] };
      return { title: `Stage ${rank}: ${this.nameOf(event)}`, lines: [`${ms(event.s)} to ${ms(event.s + event.l)}: ${ms(event.l)}${event.ph ? `, ${PHASES[event.ph]}` : ""}`] };
    }

    chosen(id) {
      if (!id) return this.showMoment();
      const { rank, event, gap } = this.event(id);
      if (event) {
        this.current = { rank, event };
        this.timeline.marks.t = event.s + Math.min(event.l / 2, 1);
      } else {
        this.current = null;
        this.timeline.marks.t = gap.s + gap.l / 2;
      }
      this.showMoment(gap && { rank, gap });
    }

    // -- Time --

    seek(t) {
      this.current = null;
      this.timeline.marks.chosen = null;
      this.timeline.marks.t = Math.max(0, Math.min(t, this.step.length));
      this.showMoment();
    }

    stepBy(direction) {
      if (!Number.isFinite(direction)) return this.seek(direction > 0 ? this.step.length : 0);
      const t = this.timeline.marks.t ?? 0;
      let place = this.current ? this.calls.findIndex((c) => c.event === this.current.event) : -1;
      if (place >= 0) place += direction;
      else place = direction > 0 ? this.calls.findIndex((c) => c.event.s >= t) : this.calls.findLastIndex((c) => c.event.s <= t);
      this.goTo(place);
    }

    goTo(place) {
      const call = this.calls[place];
      if (!call) return;
      this.current = call;
      const { rank, event } = call;
      const marks = this.timeline.marks;
      marks.t = event.s + Math.min(event.l / 2, 1);
      const id = `${rank}:${event.i}`;
      marks.chosen = this.timeline.cell(id) ? id : null;
      this.timeline.reveal(event.s, event.s + event.l);
      this.showMoment();
      this.timeline.live.textContent = `Stage ${rank}: ${this.nameOf(event)} at ${ms(event.s)}`;
    }

    // -- What is going on at a moment --

    showMoment(blame = null) {
      const { t } = this.timeline.marks;
      this.transport.show(t, `${ms(t)} of ${ms(this.step.length)}`);
      this.showWhy(blame);
      this.stacks.replaceChildren(...this.step.ranks.map((_, rank) => this.stackOf(rank, t)));
      const flying = this.step.messages.filter((m) => m.b && m.a[2] <= t && t < m.b[2]);
      this.flights.replaceChildren(...(flying.length ? flying.map((m) => make("li", {}, `${m.x}: stage ${m.a[0]} → ${m.b[0]}, sent at ${ms(m.a[2])}, there at ${ms(m.b[2])}`))
        : [make("li", { class: "mmp-empty" }, "None at this moment.")]));
      this.mark();
      this.writeAddress();
    }

    mark() {
      const { t, chosen } = this.timeline.marks;
      const isOwn = (m) => {
        const e = this.current;
        if (!e) return false;
        return (m.a[0] === e.rank && (m.d === e.event.i || m.a[1] === e.event.i)) || (m.b[0] === e.rank && (m.u === e.event.i || m.b[1] === e.event.i));
      };
      const lines = this.step.messages.filter((m) => m.b && (this.showMessages.checked || isOwn(m) || (m.a[2] <= t && t < m.b[2])))
        .map((m) => ({ a: { rank: m.a[0], t: m.a[2] }, b: { rank: m.b[0], t: m.b[2] }, isFaint: !isOwn(m) }));
      this.timeline.mark({ lines, chosen });
    }

    showWhy(blame) {
      const { current } = this;
      if (blame) {
        const { rank, gap } = blame, cause = gap.f && this.byIndex[gap.f[0]].get(gap.f[1]);
        this.why.replaceChildren(make("h3", {}, `Stage ${rank} computes nothing for ${ms(gap.l)}`), make("p", {}, `${gap.x}.`),
          cause ? make("p", {}, "Go to ", make("button", { type: "button", class: "mmp-link", onclick: () => this.timeline.choose(`${gap.f[0]}:${gap.f[1]}`) }, `${this.nameOf(cause)} on stage ${gap.f[0]}`)) : "");
      } else if (current) {
        const { rank, event } = current, [name, url] = this.data.functions[event.f];
        const words = [`${ms(event.l)} from ${ms(event.s)}`, PHASES[event.ph], event.w || event.t ? `waited ${ms(event.w || 0)}, transfer ${ms(event.t || 0)}` : null].filter(Boolean);
        this.why.replaceChildren(make("h3", {}, `Stage ${rank} calls `, url ? make("a", { href: MM.base + url }, MM.code(name)) : MM.code(name), event.k in LETTERS ? `: ${this.nameOf(event)}` : ""),
          make("p", {}, `${words.join(", ")}.`), ...(event.x || []).map((word) => make("p", {}, this.data.words[word])));
      } else this.why.replaceChildren(make("p", { class: "mmp-empty" }, "Step on, or choose a bar or a gap. Below: what every rank is inside of at this moment."));
    }

    // The innermost call that a rank is inside of, and the lines that lead there.
    stackOf(rank, t) {
      const { current } = this, isCurrent = current?.rank === rank;
      let event = isCurrent ? current.event : null;
      if (!event) for (const other of this.step.ranks[rank].events) {
        if (other.s > t) break;
        if (other.s + other.l > t) event = other;
      }
      const head = make("p", { class: "mmp-head" }, make("b", {}, `Stage ${rank}`), event ? ` ${this.nameOf(event)}` : " between calls");
      if (!event) return make("div", { class: "mmp-stack" }, head);
      const [name, url, dotted] = this.data.functions[event.f];
      const frames = this.data.stacks[event.st].map((number) => this.data.frames[number]);
      const doing = [];
      for (let at = event; at; at = this.byIndex[rank].get(at.p)) if (at.k in LETTERS || at.k === "communicate") doing.push(...(at === event ? [] : [this.nameOf(at)]));
      const words = [...doing.map((what) => `in ${what}`), ...(event.x || []).map((word) => this.data.words[word])];
      return make("div", { class: `mmp-stack${isCurrent ? " mmp-current" : ""}` }, head,
        words.length ? make("p", { class: "mmp-words" }, words.join("; ")) : null,
        MM.chain([...frames.slice(-4), [dotted || name, url, ""]], MM.base),
        frames.length > 4 ? make("details", {}, make("summary", {}, `${frames.length - 4} lines further out`), MM.chain(frames.slice(0, -4), MM.base, false)) : null);
    }

    showSource() {
      const { provenance, gone } = this.data, { command, date, versions, machine, clock } = provenance;
      const row = (name, value) => [make("dt", {}, name), make("dd", {}, value)];
      this.source.replaceChildren(make("details", {}, make("summary", {}, `A recorded run: ${date}, ${machine}`), make("dl", { class: "mmp-facts" },
        ...row("Command", make("code", {}, command)), ...row("Versions", Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(", ")),
        ...row("Clocks", clock), ...(gone.length ? row("Source", `${gone.length} recorded calls are no longer there; their links lead to the function`) : []))));
    }

    drawTable() {
      if (!this.twin.open) return;
      this.table.replaceChildren(...this.step.ranks.map((owner, rank) => make("table", {}, make("caption", {}, `Stage ${rank} (rank ${owner.rank})`),
        make("thead", {}, make("tr", {}, ...["start", "length", "action", "phase", "waited", "transfer", "moved"].map((words) => make("th", { scope: "col" }, words)))),
        make("tbody", {}, ...owner.events.filter((e) => ACTIONS.includes(e.k)).map((e) => make("tr", {}, ...[ms(e.s), ms(e.l), this.nameOf(e), PHASES[e.ph] || "",
          e.w ? ms(e.w) : "", e.t ? ms(e.t) : "", (e.x || []).map((word) => this.data.words[word]).join("; ")].map((cell) => make("td", {}, cell))))))));
    }

    writeAddress() {
      if (!this.options.hasAddress || this.clock.running) return;
      if (!this.wasShown) return void (this.wasShown = true);
      clearTimeout(this.writing);
      this.writing = setTimeout(() => this.writeAddressNow(), 120);
    }

    writeAddressNow() {
      const words = new URLSearchParams({ recording: this.name });
      if (this.number) words.set("pipeline", this.number);
      if (this.current) words.set("call", `${this.current.rank}:${this.current.event.i}`);
      history.replaceState(history.state, "", `#${words}`);
    }
  }
})();
