"use strict";
// The words of a recording in the language of the page: MM.recorded("plan 9.1 %"). A recorder has written them
// down in English; each row below is a sentence of its, and the name of the string (say.js) that says the same.
// What is in no row, such as a shape, stays as it is.

(() => {
  const MM = (globalThis.MM ||= {});
  // A group is filled in: one called `parts` is a list of sentences, `what` one of them, others are as they were.
  const ROWS = [
    [/^step (?<n>\d+)(?<rest> \(.*\))?$/, "recorded.step"],
    [/^step$/, "recorded.step.time"],
    [/^bubble, of all time$/, "recorded.bubble"],
    [/^plan$/, "recorded.plan"],
    [/^plan (?<share>\S+ %)$/, "recorded.plan.share"],
    [/^followed exactly$/, "recorded.exactly"],
    [/^no pipeline$/, "recorded.no-pipeline"],
    [/^(?<share>[-+−]?\S+ %) over the plan with free messages, (?<time>.+)$/, "recorded.over"],
    [/^(?<share>\S+ %) of the time lies between its calls$/, "recorded.between"],
    [/^(?<actions>\d+) actions, (?<messages>\d+) messages$/, "recorded.actions"],
    [/^paced: (?<parts>[^;]+)$/, "recorded.paced"],
    [/^paced: (?<parts>[^;]+); (?<late>\d+) of (?<all>\d+) computations overran the pace$/, "recorded.paced.late"],
    [/^forward (?<time>\S+ ms)$/, "recorded.forward"],
    [/^backward (?<time>\S+ ms)$/, "recorded.backward"],
    [/^attention (?<time>\S+ ms)$/, "recorded.attention"],
    // Why a stage waited.
    [/^(?<time>\S+ ms) at the end, its work done$/, "recorded.gap.end"],
    [/^(?<time>\S+ ms) before (?<what>[^:]+): (?<parts>.+)$/, "recorded.gap"],
    [/^(?<time>\S+ ms) waiting for (?<what>.+) of stage (?<rank>\d+)$/, "recorded.waiting.for"],
    [/^(?<time>\S+ ms) waiting$/, "recorded.waiting"],
    [/^(?<time>\S+ ms) transfer$/, "recorded.transfer"],
    [/^(?<time>\S+ ms) own work$/, "recorded.own"],
    [/^(?<unit>[FBW]\d+) of chunk (?<chunk>\d+)$/, "recorded.unit"],
    [/^(?<unit>[FBW]\d+) of chunk (?<chunk>\d+) & (?<other>[FBW]\d+) of chunk (?<otherChunk>\d+)$/, "recorded.pair"],
    // What a call moved.
    [/^activation of microbatch (?<mb>\d+)$/, "recorded.activation"],
    [/^gradient of microbatch (?<mb>\d+)$/, "recorded.gradient"],
    [/^activation of microbatch (?<mb>\d+), chunk (?<chunk>\d+)$/, "recorded.activation.chunk"],
    [/^gradient of microbatch (?<mb>\d+), chunk (?<chunk>\d+)$/, "recorded.gradient.chunk"],
    [/^(?<what>.+) → stage (?<rank>\d+), (?<size>[^,]+)$/, "recorded.sent"],
    [/^(?<what>.+) ← stage (?<rank>\d+), (?<size>[^,]+)$/, "recorded.received"],
    [/^sending (?<what>.+) to stage (?<rank>\d+)$/, "recorded.sending"],
    [/^receiving (?<what>.+) from stage (?<rank>\d+)$/, "recorded.receiving"],
    [/^(?<size>\S+ K?i?B) over (?<ranks>\d+) ranks$/, "recorded.ranks"],
    [/^nothing to move here$/, "recorded.nothing"],
    [/^keys and values, hop (?<hop>\d+) of layer (?<layer>\d+), forward, (?<size>.+) to the next of (?<ranks>\d+) ranks$/, "recorded.hop.forward"],
    [/^keys and values, hop (?<hop>\d+) of layer (?<layer>\d+), backward, (?<size>.+) to the next of (?<ranks>\d+) ranks$/, "recorded.hop.backward"],
    [/^gradients of keys and values, hop (?<hop>\d+) of layer (?<layer>\d+), backward, (?<size>.+) to the next of (?<ranks>\d+) ranks$/, "recorded.hop.gradients"],
    [/^(?<call>all-to-all|ring-hop), (?<what>.+): in flight (?<time>\S+ ms), exposed (?<wait>\S+ ms)$/, "recorded.exchange"],
    // Titles.
    [/^(?<schedule>.+) on (?<ranks>\d+) ranks, paced$/, "recorded.title.paced"],
    [/^(?<schedule>.+) on (?<ranks>\d+) ranks, as fast as they go$/, "recorded.title.fast"],
    [/^One rank, no pipeline$/, "recorded.title.one"],
    [/^(?<t>\d+) tensor-parallel ranks × (?<p>\d+) stages$/, "recorded.title.tensor"],
    [/^A ring of attention on (?<ranks>\d+) ranks$/, "recorded.title.ring"],
    [/^Experts over (?<ranks>\d+) ranks, (?<p>\d+) stages$/, "recorded.title.experts"],
    [/^ZeRO-1 with overlap, (?<p>\d+) stages × (?<d>\d+) copies$/, "recorded.title.zero"],
  ];

  MM.recorded = (text) => {
    for (const [pattern, name] of ROWS) {
      const found = pattern.exec(text);
      if (found) return MM.say(name, filled(found.groups ?? {}));
    }
    return text;
  };

  const filled = (groups) => Object.fromEntries(Object.entries(groups).map(([name, text = ""]) => {
    if (name === "parts") return [name, text.split(", ").map(MM.recorded).join(MM.say("recorded.comma"))];
    return [name, name === "what" ? MM.recorded(text) : text];
  }));
})();
