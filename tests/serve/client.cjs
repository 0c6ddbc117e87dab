// A client in JavaScript: asks for one text in each way, and prints what it was told as JSON. It is the official one
// where its package is installed, else these requests by fetch, as the API's reference has them.
const [baseURL, apiKey] = process.argv.slice(2);

async function post(path, body) {
  const headers = { Authorization: `Bearer ${apiKey}`, "Content-Type": "application/json" };
  const answer = await fetch(baseURL + path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!answer.ok) throw { status: answer.status, param: (await answer.json()).error.param };
  if (!body.stream) return answer.json();
  const lines = (await answer.text()).split("\n").filter((line) => line.startsWith("data: {"));
  return lines.map((line) => JSON.parse(line.slice(6)));
}

function byFetch() {
  const create = (path) => ({ create: (body) => post(path, body) });
  return { chat: { completions: create("/chat/completions") }, responses: create("/responses") };
}

function official() {
  try {
    return require("openai");
  } catch {
    return null;
  }
}

const OpenAI = official();
const client = OpenAI ? new OpenAI({ baseURL, apiKey, maxRetries: 0 }) : byFetch();
const textOf = (response) => response.output.flatMap((item) => item.content).map((part) => part.text).join("");
const asked = { model: "helpdesk", input: "hello", max_output_tokens: 6 };

async function main() {
  const messages = [{ role: "user", content: "hello" }];
  const chat = await client.chat.completions.create({ model: "helpdesk", messages, max_tokens: 6 });
  const response = await client.responses.create(asked);
  const numbers = [];
  let streamed = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    numbers.push(event.sequence_number);
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  const next = { ...asked, input: "and?", max_output_tokens: 2 };
  const chained = await client.responses.create({ ...next, previous_response_id: response.id });
  const refused = await client.responses.create({ ...asked, background: true }).catch((error) => error);
  console.log(
    JSON.stringify({
      texts: [chat.choices[0].message.content, textOf(response), streamed],
      official: OpenAI !== null,
      numbers,
      models: [chat.model, response.model, chained.model],
      chained: chained.previous_response_id === response.id,
      refused: [refused.status, refused.param],
    }),
  );
}

main();
