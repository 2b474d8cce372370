// The sample browser: filters, an order, and pages of samples.

const PER_PAGE = 10;
const TINTS = ["#56B4E9", "#E69F00", "#5fd3ae", "#F0E442", "#e3a5cb", "#9ec5e8", "#f0b184", "#c9c9c9"];
const ORDERS = {
  "version, first": (a, b) => a.version - b.version,
  "version, last": (a, b) => b.version - a.version,
  "reward, high": (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity),
  "reward, low": (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity),
  "length, long": (a, b) => b.length - a.length,
  "length, short": (a, b) => a.length - b.length,
  "spread of rewards": (a, b) => (b.spread ?? -1) - (a.spread ?? -1),
};

function browse(place, data) {
  const all = data.samples;
  all.forEach((s) => {
    s.found = [s.prompt, s.truth, ...s.responses.flatMap((r) => [r.answer, ...r.segments.map((p) => p[3]),
      ...r.messages.map((m) => m[1])])]
      .join("\n").toLowerCase();
  });
  place.append(element("p", "how",
    "Read some samples with a high reward and some with a low one: does the reward say what you mean? " +
    "The colour of a text is the version that drew it; two colours show a response that a sync interrupted."));
  place.append(element("p", "note",
    all.length === data.total
      ? "Showing all " + data.total.toLocaleString("en-US") + " kept samples."
      : "Showing " + all.length.toLocaleString("en-US") + " of " + data.total.toLocaleString("en-US") +
        " kept samples: evenly spaced versions, the first and the last, and extremes of reward, spread and length. RUN/samples/ has the others."));
  const form = element("div", "controls");
  const control = (name, made) => {
    const label = element("label", "", name);
    made.name = name;
    label.append(made);
    form.append(label);
    made.addEventListener("input", () => show(0));
    return made;
  };
  const select = (name, values) => {
    const made = element("select");
    values.forEach((value) => made.append(element("option", "", value)));
    return control(name, made);
  };
  const range = (name) => {
    const made = element("input");
    made.type = "number";
    made.step = "any";
    return control(name, made);
  };
  const unique = (values) => ["all", ...[...new Set(values)].sort()];
  const search = element("input");
  search.type = "search";
  control("text", search);
  const source = select("data source", unique(all.map((s) => s.source)));
  const outcome = select("outcome", unique(all.map((s) => s.outcome)));
  const [from, to] = [range("from version"), range("to version")];
  const [least, most] = [range("least reward"), range("most reward")];
  const order = select("order", Object.keys(ORDERS));
  const list = element("div");
  const pager = element("div", "controls");
  place.append(form, pager, list);

  const limit = (input, missing) => (input.value === "" ? missing : Number(input.value));
  function chosen() {
    const words = search.value.toLowerCase();
    return all.filter((s) =>
      s.found.includes(words) &&
      (source.selectedIndex <= 0 || s.source === source.value) &&
      (outcome.selectedIndex <= 0 || s.outcome === outcome.value) &&
      s.version >= limit(from, -Infinity) && s.version <= limit(to, Infinity) &&
      ((least.value === "" && most.value === "") || s.responses.some((r) =>
        r.reward !== null && r.reward >= limit(least, -Infinity) && r.reward <= limit(most, Infinity)))
    ).sort((a, b) => ORDERS[order.value](a, b) || a.id - b.id);
  }
  function show(page) {
    const found = chosen();
    const first = page * PER_PAGE;
    const last = Math.min(first + PER_PAGE, found.length);
    const back = element("button", "", "back");
    const next = element("button", "", "next");
    back.disabled = page === 0;
    next.disabled = last >= found.length;
    back.onclick = () => show(page - 1);
    next.onclick = () => show(page + 1);
    const words = found.length ? (first + 1) + " to " + last + " of " + found.length : "no sample fits";
    pager.replaceChildren(back, element("span", "shown", words), next);
    list.replaceChildren(...found.slice(first, last).map(card));
  }
  show(0);
}

function card(sample) {
  const made = element("div", "sample");
  const facts = ["sample " + sample.id, "version " + sample.version, sample.outcome, sample.source,
    sample.mean === null ? "no reward" : "mean reward " + sample.mean + " ± " + sample.spread,
    sample.length + " tokens", sample.admitted === null ? "" : "admitted at version " + sample.admitted];
  made.append(element("div", "meta", facts.filter(Boolean).join(" · ")));
  made.append(element("div", "words prompt", sample.prompt));
  if (sample.truth !== null && sample.truth !== "") made.append(element("div", "meta", "ground truth: " + sample.truth));
  const rewards = sample.responses.map((r) => r.reward).filter((r) => r !== null);
  const [low, high] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  sample.responses.forEach((r) => made.append(response(r, low, high)));
  return made;
}

function response(r, low, high) {
  const made = element("div", "response");
  const left = element("div", "reward");
  const turns = r.messages.filter(([role]) => role === "assistant").length;
  left.append(element("b", "", r.reward === null ? "no reward" : r.reward), " · " + r.tokens + " tokens, " + (turns > 1 ? turns + " turns, " : "") + (r.ended || r.stop));
  const bar = element("div", "bar");
  const fill = element("i");
  fill.style.width = (100 * ((r.reward ?? low) - low)) / (high - low || 1) + "%";
  bar.append(fill);
  left.append(bar);
  const lines = Object.entries(r.components).map(([name, value]) => name + " " + value);
  if (r.raw !== null && r.raw !== r.reward) lines.unshift("before shaping " + r.raw);
  if (r.answer !== null) lines.push("answer: " + r.answer);
  if (r.threads > 1) lines.unshift(r.threads + " threads");
  lines.forEach((line) => left.append(element("div", "", line)));
  const words = element("div", "words");
  let thread = 1;
  r.segments.forEach(([version, author, tokens, text], i) => {
    if (author === "opening") {
      if (i) thread += 1;
      words.append(element("div", "thread", "thread " + thread));
    }
    const policy = author === "policy";
    const tint = policy ? TINTS[Math.max(0, version) % TINTS.length] : "#999999";
    const chip = element("span", "chip", policy ? "v" + version : author);
    chip.style.background = tint;
    chip.title = tokens + " tokens";
    const segment = element("span", "segment", text);
    segment.style.borderBottomColor = tint;
    words.append(chip, segment);
  });
  const right = element("div");
  right.append(words);
  if (r.messages.length) right.append(conversation(r.messages));
  made.append(left, right);
  return made;
}

function conversation(messages) {
  const made = element("details", "said");
  made.append(element("summary", "", "who said what: " + messages.length + " messages"));
  messages.forEach(([role, text]) => {
    made.append(element("div", "role", role === "assistant" ? "policy" : role), element("div", "words", text));
  });
  return made;
}
