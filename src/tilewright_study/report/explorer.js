// The tile explorer: a schedule's items over the pattern, drawn from the data of the script element "scene".
document.getElementById("explore").addEventListener("click", async () => {
  document.getElementById("explore").remove();
  document.getElementById("stage").hidden = false;
  const scene = JSON.parse(await unpack(document.getElementById("scene").textContent));
  document.head.append(Object.assign(document.createElement("script"), {
    textContent: await unpack(document.getElementById("plotly").textContent),
  }));
  const plot = document.getElementById("plot");
  const choice = document.getElementById("controls").elements;
  const count = (value) => value.toLocaleString("en");
  const many = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
  const time = (us) => (us < 1000 ? `${us.toPrecision(3)} µs` : `${(us / 1000).toPrecision(4)} ms`);
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const known = (values) => [...new Set(values)];
  let drawn = null;

  /** Fill `select` with `values`; one that stays possible stays chosen, and the first `preferred` one is at first. */
  function offer(select, values, preferred = "") {
    const before = select.value || values.find((value) => value.includes(preferred));
    select.replaceChildren(...values.map((value) => new Option(value)));
    if (values.includes(before)) select.value = before;
  }

  function offerOrders() {
    const orders = scene.patterns.filter((pattern) => pattern.model === choice.model.value).map((pattern) => pattern.order);
    offer(choice.order, orders, "window");
    offerPlans();
  }

  function offerPlans() {
    const place = scene.patterns.findIndex(
      (pattern) => pattern.model === choice.model.value && pattern.order === choice.order.value);
    offer(choice.plan, scene.plans.filter((plan) => plan.pattern === place).map((plan) => plan.name), "HiGHS");
    draw(place);
  }

  /** What colours the items: value of each, colour scale and the ticks of the legend. */
  function colouring(plan) {
    const { tile, round, entries, pairs, latency_us } = plan.items;
    const steps = (colours) => colours.flatMap((colour, i) => [[i / colours.length, colour], [(i + 1) / colours.length, colour]]);
    const kinds = (names, values, colours) => ({
      values, colorscale: steps(colours), zmin: -0.5, zmax: names.length - 0.5,
      colorbar: { tickvals: names.map((_, i) => i), ticktext: names },
    });
    if (choice.colour.value === "tile") {
      const used = known(tile).sort((a, b) => a - b);
      const names = used.map((t) => plan.tiles[t]);
      return kinds(names, tile.map((t) => used.indexOf(t)), names.map((name) => scene.colours[name]));
    }
    if (choice.colour.value === "round") {
      const used = known(round);
      const palette = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"];
      const colours = used.map((_, i) => palette[i % palette.length]);
      return kinds(used.map((r) => `round ${r + 1}`), round.map((r) => used.indexOf(r)), colours);
    }
    if (choice.colour.value === "density") {
      const values = entries.map((n, i) => n / pairs[i]);
      return { values, colorscale: "Viridis", zmin: 0, zmax: 1, colorbar: { tickformat: ".0%" } };
    }
    return { values: latency_us, colorscale: "Viridis", zmin: 0, zmax: Math.max(...latency_us), colorbar: { ticksuffix: " µs" } };
  }

  /** [name, value] of everything that is known about item `i`. */
  function facts(plan, i) {
    const { stripe, tile, round, lane, split, start_us, latency_us, entries, pairs } = plan.items;
    return [
      ["Tile", plan.tiles[tile[i]] + (split[i] ? ", part of a split block" : "")],
      ["Round", `${round[i] + 1}, lane ${lane[i]}`],
      ["Density", percent(entries[i] / pairs[i])],
      ["Predicted", time(latency_us[i])],
      ["Starts at", time(start_us[i])],
      ["Queries", `${count(plan.edges[stripe[i]])} to ${count(plan.edges[stripe[i] + 1] - 1)}`],
      ["Pairs", `${count(entries[i])} allowed of ${count(pairs[i])} executed`],
    ];
  }

  function draw(place) {
    const pattern = scene.patterns[place];
    const plan = scene.plans.find((some) => some.pattern === place && some.name === choice.plan.value);
    const facet = document.getElementById("plan-facts");
    facet.textContent = `${count(pattern.shape[0])} queries, ${count(pattern.shape[1])} keys, density ${percent(pattern.density)}. `;
    if (!plan) {
      facet.textContent += "No schedule of it is in this report.";
      Plotly.purge(plot);
      return;
    }
    const rounds = known(plan.items.round).length;
    facet.textContent += `Predicted ${time(plan.predicted_us)} on ${many(plan.lanes, "lane")}: ${many(plan.items.tile.length, "item")}, `
      + `${many(rounds, "round")}, ${plan.status}`
      + (plan.status === "heuristic" ? "." : `, gap ${(100 * plan.gap).toFixed(2)} %.`);
    const [rows, keys] = pattern.shape;
    const [high, wide] = pattern.cell;
    const cells = Math.ceil(keys / wide);
    const { values, colorscale, zmin, zmax, colorbar } = colouring(plan);
    const blank = () => Array.from({ length: plan.edges.length - 1 }, () => new Array(cells).fill(null));
    const [z, text, item] = [blank(), blank(), blank()];
    plan.items.cells.forEach((stretches, i) => {
      const words = facts(plan, i).map(([name, value]) => `${name}: ${value}`).join("<br>");
      for (let s = 0; s < stretches.length; s += 2) {
        for (let c = stretches[s]; c < stretches[s + 1]; c++) {
          const stripe = plan.items.stripe[i];
          [z[stripe][c], text[stripe][c], item[stripe][c]] = [values[i], words, i];
        }
      }
    });
    const width = plot.clientWidth;
    const narrow = width < 520;
    const margin = { l: 60, r: 8, t: narrow ? 8 : 34, b: 96 };
    const across = width - margin.l - margin.r;
    const x = Array.from({ length: cells + 1 }, (_, c) => Math.min(c * wide, keys));
    const heatmap = {
      type: "heatmap", x, y: plan.edges, z, text, customdata: item, zmin, zmax, colorscale, opacity: 0.62, hoverongaps: false,
      ygap: plan.edges.length < 130 ? 1 : 0, 
      // A label would hide a narrow plot; the list below it says the same.
      ...(narrow ? { hoverinfo: "none" } : { hovertemplate: "%{text}<extra></extra>" }),
      colorbar: { orientation: "h", y: 0, yref: "container", yanchor: "bottom", thickness: 12, len: 0.9, outlinewidth: 0, ...colorbar },
    };
    const axis = { showgrid: false, zeroline: false, ticks: "outside", ticklen: 4, separatethousands: true };
    const layout = {
      // The same place keeps its zoom. Axis and legend stay in the window.
      width, height: Math.min(across + margin.t + margin.b, 860, Math.max(window.innerHeight - 220, 360)), margin,
      dragmode: narrow ? false : "zoom", uirevision: `pattern ${place}`,
      font: { family: "system-ui, sans-serif", size: 12, color: "#1f2328" }, hoverlabel: { align: "left" }, hovermode: "closest",
      xaxis: { ...axis, range: [0, keys], title: { text: "keys", standoff: 6 } },
      yaxis: { ...axis, range: [rows, 0], title: { text: "queries", standoff: 6 } },
      images: [{
        source: pattern.picture, xref: "x", yref: "y", x: 0, y: 0, sizex: cells * wide,
        sizey: Math.ceil(rows / high) * high, sizing: "stretch", yanchor: "top", layer: "below",
      }],
    };
    drawn = place;
    show([["Item", "none chosen yet"]]);
    const buttons = [["zoom2d", "pan2d", "resetScale2d"]];
    Plotly.react(plot, [heatmap], layout, { displaylogo: false, modeBarButtons: buttons, displayModeBar: !narrow })
      .then(() => {
        plot.removeAllListeners("plotly_hover");
        plot.removeAllListeners("plotly_click");
        const tell = (event) => show(facts(plan, event.points[0].customdata));
        plot.on("plotly_hover", tell);
        plot.on("plotly_click", tell);
      });
  }

  function show(pairs) {
    const element = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
    const parts = pairs.flatMap(([name, value]) => [element("dt", name), element("dd", value)]);
    document.getElementById("item").replaceChildren(...parts);
  }

  choice.model.addEventListener("change", offerOrders);
  choice.order.addEventListener("change", offerPlans);
  for (const select of [choice.plan, choice.colour]) select.addEventListener("change", () => draw(drawn));
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) draw(drawn);
    width = window.innerWidth;
  });
  offer(choice.model, known(scene.patterns.map((pattern) => pattern.model)));
  offerOrders();
});
