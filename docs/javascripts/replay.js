"use strict";
// The replay: a recorded run, call by call. What `minimegatron trace` knows of it was put into
// recordings/NAME.js when the site was built (docs/tools/player/emit_player.py): times, gaps and their reasons,
// messages, the plan at the run's own speed. recorded_model.js gives it the same view as a plan has.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make, say = (...words) => MM.say(...words), ms = MM.milliseconds, { check } = MM;
  const ACTIONS = ["forward", "backward", "backward-input", "backward-weight", "pair", "communicate"];

  MM.mountReplay = async function mountReplay(root, options) {
    const replay = new Replay(root, options);
    root.mmReplay = replay;
    await replay.start(options.recording);
    return replay;
  };

  const pretty = (words) => words.replaceAll("->", "→").replaceAll("<-", "←").replaceAll(" x ", " × ");

  async function load(name) {
    await MM.load(`recordings/${name}.js`);
    const data = await MM.engine.unpack(MM.packed[`recording ${name}`]);
    data.words = data.words.map((words) => MM.recorded(pretty(words)));
    return data;
  }

  class Replay {
    constructor(root, options) {
      this.root = root;
      const id = check.words(/^\d+[:>][\w.:&#<>?-]+$/);
      this.address = new MM.Address("replay", {
        recording: check.one(() => Object.keys(MM.links.recordings)), pipeline: check.number({ min: 0, max: 1000, whole: true }), at: id, call: id,
        follow: check.number({ min: 0, max: 127, whole: true }), step: check.number({ min: 0, max: 10000, whole: true }), t: check.number({ min: 0, max: 1e12 }), messages: check.flag, plan: check.flag,
      }, options.isFirst);
      root.id ||= this.address.name;
      this.build();
    }

    async start(recording) {
      await this.openAsAsked(recording);
      this.isMounted = true;
      this.address.listen(() => this.openAsAsked(this.name));
    }

    async openAsAsked(recording) {
      const { values, faults } = this.address.read();
      this.showMessages.checked = Boolean(values.messages);
      this.showPlan.checked = values.plan !== 0;
      await this.open(values.recording ?? recording ?? Object.keys(MM.links.recordings)[0], values, faults);
    }

    // -- Elements --

    build() {
      this.names = make("select", { onchange: () => this.open(this.names.value) },
        ...Object.entries(MM.links.recordings).map(([name, title]) => make("option", { value: name }, MM.recorded(title))));
      this.steps = make("select", { onchange: () => this.openStep(Number(this.steps.value)) });
      this.stepsField = MM.field(say("replay.pipeline"), this.steps);
      this.grain = make("select", { onchange: () => this.list() },
        make("option", { value: "action" }, say("replay.actions")), make("option", { value: "call" }, say("replay.calls")));
      this.showPlan = make("input", { type: "checkbox", checked: true, onchange: () => this.redraw() });
      this.showMessages = make("input", { type: "checkbox", onchange: () => this.redraw() });
      this.timeline = new MM.Timeline({
        label: say("replay.name"), describe: (id) => this.explain.describe(id), choose: (id) => this.chosen(id),
        intercept: (key) => this.following?.key(key), keys: { " ": () => this.clock.toggle(this.timeline.marks.t), ".": () => this.stepBy(1), ",": () => this.stepBy(-1), Enter: () => this.inspector.body.focus() },
      });
      this.explain = new MM.RecordedExplanation({ scene: () => this.scene, choose: (id) => this.timeline.choose(id), follow: (mb) => this.follow(mb) });
      this.inspector = new MM.Inspector({ root: this.root, isInline: false, close: () => this.dismissed(), chosenBox: () => this.chosenBox() });
      this.clock = new MM.Clock({ span: () => this.step.length, next: (t) => this.calls.find((c) => c.event.s > t + 0.01)?.event.s ?? this.step.length, tick: (t) => this.seek(t, true), changed: () => {} });
      this.clock.seconds = 30;
      MM.playFollows(this);
      this.transport = MM.transport({ clock: this.clock, seek: (t) => this.seek(t), step: (direction) => this.stepBy(direction) });
      this.transport.now = () => this.timeline.marks.t;
      this.figures = make("dl", { class: "mmp-figures" });
      this.status = make("p", { class: "mmp-status", role: "status" });
      this.badge = make("p", {});
      this.legend = make("ul", { class: "mmp-legend", "aria-label": say("legend.name") });
      this.stacks = make("div", { class: "mmp-stacks", tabindex: "-1", role: "group", "aria-label": say("replay.stacks") });
      this.flights = make("ul", { class: "mmp-flights" });
      this.table = make("div", { class: "mmp-table", tabindex: "0", role: "region", "aria-label": say("table.name") });
      this.twin = make("details", { class: "mmp-twin", ontoggle: () => this.drawTable() }, make("summary", {}, say("table.same")), this.table);
      this.source = make("div", { class: "mmp-source" });
      const check = (input, name) => make("label", { class: "mmp-switch" }, input, ` ${say(name)}`);
      const tools = make("div", { class: "mmp-tools" }, make("button", { type: "button", onclick: () => this.follow(0) }, say("player.follow")), MM.copyLink(() => this.address.link(this.values())));
      this.printed = make("p", { class: "mmp-printed" }); // on paper there are no controls
      this.root.replaceChildren(make("div", { class: "mmp" }, this.printed,
        make("div", { class: "mmp-controls" }, MM.field(say("replay.recording"), this.names), this.stepsField, MM.field(say("replay.grain"), this.grain),
          check(this.showPlan, "replay.plan"), check(this.showMessages, "replay.messages")),
        this.status, this.badge, this.timeline.element, make("div", { class: "mmp-bar" }, this.transport.element, this.timeline.zooms), this.legend, this.figures, tools,
        make("p", { class: "mmp-head" }, say("replay.stacks")), this.stacks, make("p", { class: "mmp-head" }, say("replay.flights")), this.flights, this.twin, this.source, this.timeline.help, this.inspector.element));
    }

    // -- Opening --

    async open(name, asked = {}, faults = []) {
      this.clock.pause();
      this.stopFollowing();
      this.name = name;
      const data = await load(name);
      if (this.name !== name) return; // another one has been asked for meanwhile
      this.data = data;
      this.names.value = name;
      this.steps.replaceChildren(...this.data.steps.map((step, number) => make("option", { value: number }, MM.recorded(step.label))));
      this.stepsField.hidden = this.data.steps.length < 2;
      this.showSource();
      const number = asked.pipeline ?? 0, last = this.data.steps.length - 1;
      if (number > last) faults.push(say("player.none", { what: `pipeline = ${number}` }));
      this.openStep(Math.min(number, last), asked, faults);
    }

    openStep(number, asked = {}, faults = []) {
      this.stopFollowing();
      this.number = number;
      this.steps.value = String(number);
      this.step = this.data.steps[number];
      this.scene = new MM.RecordedScene(this.data, this.step, MM.links.kinds);
      Object.assign(this.timeline.marks, { t: null, chosen: null, lines: [], paths: null });
      this.badge.replaceChildren(...(this.step.paced ? [make("span", { class: "mmp-badge" }, MM.recorded(this.step.paced))] : []));
      this.badge.hidden = !this.step.paced;
      this.printed.textContent = MM.recorded(this.data.title);
      MM.figures(this.figures, this.step.figures.map(({ label, value, remark, bad }) => [MM.recorded(label), MM.recorded(value), MM.words.minus(MM.recorded(remark)), bad]));
      this.list();
      this.timeline.set(this.view(), this.scene.shades);
      this.showLegend();
      if (this.twin.open) this.drawTable();
      this.goAsAsked(asked, faults);
    }

    goAsAsked({ at, call, follow, step = 0, t }, faults) {
      const id = at ?? this.idOfOld(call), found = id && this.scene.find(id), last = this.step.ranks.length - 1;
      const notes = [...faults, id && !found ? say("address.gone", { id, last }) : ""], isTooLate = t > Math.ceil(this.step.length / 1000);
      if (follow >= this.scene.numMicrobatches) notes.push(say("player.none", { what: `follow = ${follow}` }));
      if (isTooLate) notes.push(say("player.none", { what: `t = ${t}` }));
      const said = notes.filter(Boolean).join(" ");
      this.status.textContent = said;
      this.status.hidden = !said;
      this.current = null;
      if (follow < this.scene.numMicrobatches) this.follow(follow, step);
      else if (found?.event) this.goTo(found);
      else if (found) this.timeline.choose(id, true);
      else this.seek(t === undefined || isTooLate ? 0.42 * this.step.length : 1000 * t);
      if (said && this.isMounted) this.writeAddress();
    }

    // Links of before named a call by its number in the recording.
    idOfOld(call) {
      if (!call) return null;
      const [rank, index] = call.split(":").map(Number);
      return this.scene.byIndex[rank]?.get(index)?.id ?? call;
    }

    // What is stepped through, in the order in which it began on any rank.
    list() {
      const isAction = this.grain.value === "action";
      this.calls = this.step.ranks.flatMap((owner, rank) => owner.events.filter((event) => !isAction || ACTIONS.includes(event.k)).map((event) => ({ rank, event })))
        .sort((a, b) => a.event.s - b.event.s || a.rank - b.rank);
    }

    // -- Timeline --

    view() {
      const lanes = { ghost: this.showPlan.checked, messages: this.showMessages.checked || this.following };
      return { tracks: this.scene.tracks(lanes), span: this.step.length, words: (us) => `${Number((us / 1000).toPrecision(6))}${us ? "" : " ms"}` };
    }

    redraw() {
      this.timeline.set(this.view(), this.scene.shades, false);
      this.showLegend();
      this.mark();
      this.writeAddress();
    }

    showLegend() {
      const entries = [];
      for (const [letter, shades] of Object.entries(this.scene.shades)) {
        if (!this.scene.kinds[letter]) continue;
        const words = say(`kind.${this.scene.kinds[letter].name}`);
        shades.forEach((shade, chunk) => entries.push(MM.kindEntry(shade, this.scene.hasChunks ? say("legend.chunk", { kind: words, chunk }) : words)));
      }
      entries.push([null, "mmp-idle", say("replay.waiting")], [null, "mmp-transferred", say("replay.transfer")], [null, "mmp-held", say("legend.held")]);
      const flying = new Set(this.step.ranks.flatMap(({ flights }) => (flights ?? []).map(({ n }) => n)));
      if (flying.has("A2A")) entries.push([null, "mmp-held", say("replay.exchange")]);
      if (flying.has("HOP")) entries.push([null, "mmp-held", say("replay.hop")]);
      if (flying.size) entries.push([null, "mmp-cap", say("replay.exposed")]);
      if (this.showPlan.checked) entries.push([null, "mmp-thin", say("replay.thin")]);
      if (this.showMessages.checked || this.following) entries.push([null, "mmp-transferred", say("legend.message")]);
      MM.legend(this.legend, entries);
    }

    chosen(id) {
      this.stopFollowing();
      const found = id && this.scene.find(id);
      this.current = found?.event ? found : null;
      if (found?.event) this.timeline.marks.t = found.event.s + Math.min(found.event.l / 2, 1);
      else if (found?.gap) this.timeline.marks.t = found.gap.s + found.gap.l / 2;
      else if (found?.message) this.timeline.marks.t = found.message.a[2];
      this.timeline.marks.paths = found?.gap ? [this.scene.path(this.scene.causalChain(found))] : null;
      this.inspect(found);
      this.showMoment();
    }

    dismissed() {
      if (this.following) return this.following.end();
      this.current = null;
      Object.assign(this.timeline.marks, { chosen: null, paths: null });
      this.mark();
      this.writeAddress();
    }

    chosenBox() {
      const id = this.timeline.marks.chosen;
      return id ? this.timeline.boxOf(id) : null;
    }

    // -- Time --

    // What is chosen stays chosen while the run plays.
    seek(t, isPlaying = false) {
      this.timeline.marks.t = Math.max(0, Math.min(t, this.step.length));
      if (!isPlaying) {
        this.stopFollowing();
        this.current = null;
        this.inspector.hide();
        Object.assign(this.timeline.marks, { chosen: null, paths: null });
      }
      this.showMoment();
    }

    stepBy(direction) {
      if (this.following) return this.following.move(direction);
      if (!Number.isFinite(direction)) return this.seek(direction > 0 ? this.step.length : 0);
      const t = this.timeline.marks.t ?? 0;
      let place = this.current ? this.calls.findIndex((c) => c.event === this.current.event) : -1;
      if (place >= 0) place += direction;
      else place = direction > 0 ? this.calls.findIndex((c) => c.event.s >= t) : this.calls.findLastIndex((c) => c.event.s <= t);
      if (this.calls[place]) this.goTo(this.calls[place]);
    }

    goTo({ rank, event }) {
      this.timeline.live.textContent = `${say("name.at", { rank, what: this.scene.name(event) })}, ${ms(event.s)}`;
      this.chosen(event.id);
      this.timeline.mark({ chosen: this.timeline.cell(event.id) ? event.id : null });
      this.timeline.reveal(event.s, event.s + event.l);
    }

    // -- What is going on at a moment --

    showMoment(t = this.timeline.marks.t) {
      this.transport.show(t, say("time.of", { time: ms(t), span: ms(this.step.length) }));
      this.stacks.replaceChildren(...this.step.ranks.map((_, rank) => this.stackOf(rank, t)));
      const flying = this.scene.messages.filter((m) => m.a[2] <= t && t < m.b[2]);
      this.flights.replaceChildren(...(flying.length ? flying.map((m) => make("li", {}, say("replay.flight", { what: m.x, from: m.a[0], to: m.b[0], sent: ms(m.a[2]), there: ms(m.b[2]) })))
        : [make("li", { class: "mmp-empty" }, say("replay.none"))]));
      this.mark();
      this.writeAddress();
    }

    isOwn(m) {
      const e = this.current;
      if (!e) return false;
      return (m.a[0] === e.rank && (m.d === e.event.i || m.a[1] === e.event.i)) || (m.b[0] === e.rank && (m.u === e.event.i || m.b[1] === e.event.i));
    }

    mark() {
      if (this.following) return this.timeline.draw();
      const { t } = this.timeline.marks;
      const lines = this.scene.messages.filter((m) => this.showMessages.checked || this.isOwn(m) || (m.a[2] <= t && t < m.b[2]))
        .map((m) => ({ a: { track: m.a[0], t: m.a[2] }, b: { track: m.b[0], t: m.b[2] }, isFaint: !this.isOwn(m) }));
      this.timeline.mark({ lines });
    }

    // -- One call, one gap --

    inspect(found) {
      if (found) this.inspector.show(...this.explain.details(found));
      else this.inspector.hide();
    }

    // The innermost call that a rank is inside of, and the lines that lead there.
    stackOf(rank, t) {
      const { current } = this, isCurrent = current?.rank === rank;
      let event = isCurrent ? current.event : null;
      if (!event) for (const other of this.step.ranks[rank].events) {
        if (other.s > t) break;
        if (other.s + other.l > t) event = other;
      }
      const head = make("p", { class: "mmp-head" }, make("b", {}, say("replay.stage", { rank })), ` ${event ? this.scene.name(event) : say("replay.between")}`);
      if (!event) return make("div", { class: "mmp-stack" }, head);
      const frames = this.scene.frames(event), doing = [];
      for (let at = event; at; at = this.scene.byIndex[rank].get(at.p)) if (at !== event && (this.scene.isWork(at) || at.k === "communicate")) doing.push(this.scene.name(at));
      const words = [...doing.map((what) => say("replay.inside", { what })), ...(event.x || []).map((word) => this.data.words[word])];
      return make("div", { class: `mmp-stack${isCurrent ? " mmp-current" : ""}` }, head,
        words.length ? make("p", { class: "mmp-words" }, words.join("; ")) : null, MM.chain(frames.slice(-5), MM.base),
        frames.length > 5 ? make("details", {}, make("summary", {}, say("replay.further", { n: frames.length - 5 })), MM.chain(frames.slice(0, -5), MM.base, false)) : null);
    }

    // -- One microbatch --

    follow(mb, place = 0) {
      this.clock.pause();
      this.stopFollowing();
      const { scene } = this;
      this.following = new MM.Follow({ scene, numbers: scene.numMicrobatches, narrate: (step) => scene.narrate(step), show: (...shown) => this.showFollowed(...shown), ended: () => this.seek(this.moment) });
      Object.assign(this.timeline.marks, { paths: null, chosen: null });
      this.timeline.set(this.view(), scene.shades, false);
      this.showLegend();
      this.following.begin(mb, place);
    }

    showFollowed(step, content, words) {
      const { message } = step;
      this.current = step.event ? { rank: step.rank, event: step.event } : null;
      this.moment = step.s + Math.min((step.e - step.s) / 2, 1);
      Object.assign(this.timeline.marks, { chosen: step.id, t: null, faded: (bar) => this.following.isFaded(bar),
        lines: message ? [{ a: { track: message.a[0], t: message.a[2] }, b: { track: message.b[0], t: message.b[2] } }] : [] });
      this.showMoment(this.moment);
      this.timeline.reveal(step.s, step.e);
      this.following.fill(this.inspector, content, this.isMounted ? "on" : null);
      this.timeline.live.textContent = words;
    }

    stopFollowing() {
      if (!this.following) return;
      this.following.stop();
      this.following = null;
      Object.assign(this.timeline.marks, { faded: null, chosen: null, lines: [] });
      this.timeline.set(this.view(), this.scene.shades, false);
    }

    // -- Where it comes from, as a table, the address --

    showSource() {
      const { provenance, gone } = this.data, { command, date, versions, machine, clock } = provenance;
      const row = (name, value) => [make("dt", {}, say(name)), make("dd", {}, value)];
      this.source.replaceChildren(make("details", {}, make("summary", {}, say("replay.source", { date, machine })), make("dl", { class: "mmp-facts" },
        ...row("replay.command", make("code", {}, command)), ...row("replay.versions", Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(", ")),
        ...row("replay.clocks", clock), ...(gone.length ? row("replay.lines", say("replay.gone", { n: gone.length })) : []))));
    }

    drawTable() {
      if (!this.twin.open) return;
      const heads = ["start", "length", "action", "phase", "waited", "transfer", "moved"].map((name) => say(`table.${name}`));
      this.table.replaceChildren(...this.step.ranks.map((owner, rank) => MM.tableOf(say("replay.caption", { rank, global: owner.rank }), heads,
        owner.events.filter((e) => ACTIONS.includes(e.k)).map((e) => [ms(e.s), ms(e.l), this.scene.name(e), MM.words.phase(e.ph), e.w ? ms(e.w) : "", e.t ? ms(e.t) : "", (e.x || []).map((word) => this.data.words[word]).join("; ")]))));
    }

    values() {
      const values = { recording: this.name }, { chosen, t } = this.timeline.marks;
      if (this.number) values.pipeline = this.number;
      if (this.showMessages.checked) values.messages = 1;
      if (!this.showPlan.checked) values.plan = 0;
      if (this.following) Object.assign(values, { follow: this.following.mb }, this.following.place ? { step: this.following.place } : {});
      else if (this.current) values.at = this.current.event.id;
      else if (chosen) values.at = chosen;
      else if (t !== null) values.t = Math.round(t / 1000);
      return values;
    }

    writeAddress() {
      if (this.isMounted && !this.clock.running) this.address.write(() => this.values());
    }
  }
})();
