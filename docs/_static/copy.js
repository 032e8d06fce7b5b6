// A button on every code block that copies its text, without the prompts and outputs of a session.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy-code";
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const lines = block.querySelector("pre").innerText.split("\n");
      const prompts = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line));
      const text = prompts.length ? prompts.map((line) => line.slice(4)).join("\n") : lines.join("\n");
      try {
        await navigator.clipboard.writeText(text.trimEnd() + "\n");
        button.textContent = "Copied";
      } catch {
        button.textContent = "Not allowed";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    block.append(button);
  }
});
