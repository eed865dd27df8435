package conformance

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Cases that are a sequence of steps are scripts in testdata/*.txt; testdata/README.md explains their
// format. This file runs them.

// scriptCase is a case of a script with one choice of its values.
type scriptCase struct {
	at    string // file:line
	group string
	name  string
	steps []scriptStep
	vars  map[string]string
}

type scriptStep struct {
	at   string
	text string
}

func TestScripts(t *testing.T) {
	group(t)
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		cases := testkit.Result(parseScript(file)).Must(t)
		for _, c := range cases {
			check(t, c.group+"/"+c.name, func(t *testing.T) {
				(&player{t: t, vars: c.vars, peers: map[string]*peer{}, messages: map[string]delivery{}}).play(c)
			})
		}
	}
}

// parseScript reads the cases of a file, each repeated as its `each` lines state.
func parseScript(file string) (all []scriptCase, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	group := ""
	var c *scriptCase
	choices := []map[string]string{{}}
	loop, times := -1, 0 // start of the repeated lines
	end := func() {
		for _, vars := range choices {
			if c != nil {
				one := *c
				one.vars, one.name = vars, expand(c.name, vars)
				all = append(all, one)
			}
		}
		c, choices = nil, []map[string]string{{}}
	}
	for i, line := range strings.Split(string(text), "\n") {
		at := fmt.Sprintf("%s:%d", file, i+1)
		line = strings.TrimSpace(line)
		switch {
		case line == "" || strings.HasPrefix(line, "# "):
		case strings.HasPrefix(line, "= "):
			end()
			group = line[2:]
		case strings.HasPrefix(line, "- "):
			end()
			c = &scriptCase{at: at, group: group, name: line[2:]}
		case c == nil:
			return nil, fmt.Errorf("%s: a step before the first case", at)
		case strings.HasPrefix(line, "each "):
			head, rows, _ := strings.Cut(line[5:], ": ")
			names := strings.Fields(head)
			var more []map[string]string
			for row := range strings.SplitSeq(rows, " | ") {
				values, err := words(row)
				if err != nil || len(values) != len(names) {
					return nil, fmt.Errorf("%s: %q are not the values of %q: %v", at, row, names, err)
				}
				for _, vars := range choices {
					one := map[string]string{}
					for k, v := range vars {
						one[k] = v
					}
					for i, name := range names {
						one[name] = values[i]
					}
					more = append(more, one)
				}
			}
			choices = more
		case strings.HasPrefix(line, "repeat "):
			if times, err = strconv.Atoi(line[7:]); err != nil {
				return nil, fmt.Errorf("%s: %w", at, err)
			}
			loop = len(c.steps)
		case line == "end":
			once := slices.Clone(c.steps[loop:])
			c.steps = c.steps[:loop]
			for n := range times {
				for _, s := range once {
					c.steps = append(c.steps, scriptStep{s.at, strings.ReplaceAll(s.text, "$i", strconv.Itoa(n))})
				}
			}
		default:
			c.steps = append(c.steps, scriptStep{at, line})
		}
	}
	end()
	return all, nil
}

// words splits a step. A word may be a Go string.
func words(text string) (all []string, err error) {
	for text = strings.TrimLeft(text, " "); text != ""; text = strings.TrimLeft(text, " ") {
		if text[0] != '"' {
			word, rest, _ := strings.Cut(text, " ")
			all, text = append(all, word), rest
			continue
		}
		quoted, err := strconv.QuotedPrefix(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", text, err)
		}
		word, err := strconv.Unquote(quoted)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", text, err)
		}
		all, text = append(all, word), text[len(quoted):]
	}
	return all, nil
}

var (
	variable   = regexp.MustCompile(`\$[A-Za-z]+`)
	repetition = regexp.MustCompile(`(?s)(\([^)]*\)|.)\*[0-9]+`)
)

// expand substitutes the values of variables, and repeats: x*3 is xxx, (ab)*2 is abab.
func expand(text string, vars map[string]string) string {
	text = variable.ReplaceAllStringFunc(text, func(name string) string {
		if value, known := vars[name[1:]]; known {
			return value
		}
		return name
	})
	return repetition.ReplaceAllStringFunc(text, func(s string) string {
		i := strings.LastIndexByte(s, '*')
		n, _ := strconv.Atoi(s[i+1:])
		return strings.Repeat(strings.Trim(s[:i], "()"), n)
	})
}

// player plays a case.
type player struct {
	t        *testing.T
	n        *node
	vars     map[string]string
	peers    map[string]*peer
	messages map[string]delivery
	mark     time.Time
}

func (y *player) play(c scriptCase) {
	t := y.t
	at := c.at
	defer func() {
		if t.Failed() {
			t.Logf("at %s", at)
		}
	}()
	vars := map[string]string{"no": noID, "bytes": ""}
	for b := range 256 {
		vars["bytes"] += string([]byte{byte(b)})
	}
	for k, v := range c.vars {
		vars[k] = v
	}
	y.vars = vars
	if len(c.steps) > 0 && strings.HasPrefix(c.steps[0].text, "start") {
		flags := testkit.Result(words(expand(c.steps[0].text, vars))).Must(t)
		y.n = start(t, flags[1:]...)
		c.steps = c.steps[1:]
	} else {
		y.n = common(t)
	}
	if y.vars["T"] == "" {
		y.vars["T"] = y.n.topic()
	}
	y.vars["U"] = y.n.topic()
	for _, s := range c.steps {
		at = s.at
		y.step(s.text)
	}
}

// step carries out a step.
func (y *player) step(text string) {
	t := y.t
	if rest, is := strings.CutPrefix(text, "?"); is { // ?key srtm ..., ?key nsq ...
		key, rest, _ := strings.Cut(rest, " ")
		whose, rest, _ := strings.Cut(rest, " ")
		if unlike(t, key) == (whose == "srtm") {
			y.step(rest)
		}
		return
	}
	if name, line, is := strings.Cut(text, " > "); is && len(name) == 1 { // a raw line
		y.peer(name).send("%s\n", expand(line, y.vars))
		return
	}
	w := testkit.Result(words(text)).Must(t)
	for i := range w {
		w[i] = expand(w[i], y.vars)
	}
	switch {
	case len(w[0]) == 1 && len(w) > 1:
		y.connection(w[0], w[1], w[2:])
	case w[0] == "GET" || w[0] == "POST" || w[0] == "PUT" || w[0] == "DELETE":
		y.request(w[0], w[1:])
	case w[0] == "publish": // over a separate connection
		y.n.publish(t, y.vars["T"], w[1:]...)
	case w[0] == "wait":
		testkit.WaitUntil(t, func() string { return y.problem(w[1:]) })
	case w[0] == "restart", w[0] == "kill": // and start again in the same folder
		if w[0] == "kill" {
			testkit.Must(t, y.n.process.Kill())
		}
		y.n, y.peers = y.n.again(t), map[string]*peer{}
	case w[0] == "mark":
		y.mark = time.Now()
	case w[0] == "since": // the mark, at least so long
		least := testkit.Result(time.ParseDuration(w[1])).Must(t)
		if waited := time.Since(y.mark); waited < least {
			t.Errorf("%v after the mark, want %v", waited, least)
		}
	case w[0] == "topic" && w[1] == "is": // the case's topic from here on
		y.vars["T"] = w[2]
	case w[0] == "message":
		y.message(w[1], w[2:])
	default:
		testkit.MustEqual(t, y.problem(w), "")
	}
}

// request is METHOD path [body] [= status [message or body]]; the default status is 200.
func (y *player) request(method string, w []string) {
	y.t.Helper()
	want := []string{"200"}
	if i := slices.Index(w, "="); i >= 0 {
		w, want = w[:i], w[i+1:]
	}
	body := ""
	if len(w) > 1 {
		body = y.pieces(w[1:])
	}
	r := y.n.web(y.t, method, strings.ReplaceAll(w[0], "#", "%23"), body)
	status := y.number(want[0])
	switch {
	case len(want) > 1 && status >= 400:
		r.refused(y.t, status, want[1])
	case r.status != status || len(want) > 1 && want[1] != "..." && strings.TrimSpace(r.body) != want[1] || len(want) > 1 && want[1] == "..." && r.body == "":
		y.t.Fatalf("%s %s: %d %.300q, want %q", method, w[0], r.status, r.body, want)
	}
}

func (y *player) number(text string) int {
	y.t.Helper()
	return testkit.Result(strconv.Atoi(text)).Must(y.t)
}

// pieces makes a body: #5 is a number of 4 bytes, batch:a,b the body of an MPUB, messages:12:x the
// body of 12 messages without their count; any other piece stands for itself.
func (y *player) pieces(w []string) (body string) {
	for _, piece := range w {
		if n, is := strings.CutPrefix(piece, "#"); is {
			body += string(binary.BigEndian.AppendUint32(nil, uint32(y.number(n))))
		} else if list, is := strings.CutPrefix(piece, "batch:"); is {
			body += batch(strings.Split(list, ",")...)
		} else if many, is := strings.CutPrefix(piece, "messages:"); is {
			count, one, _ := strings.Cut(many, ":")
			body += batch(slices.Repeat([]string{one}, y.number(count))...)[4:]
		} else {
			body += piece
		}
	}
	return body
}

// problem returns how the stats differ from the expected state: topic [name] what..., ch [name]
// what... What is `none`, or members of the stats with their values. The value of a list is its
// length; client.x belongs to the channel's only client.
func (y *player) problem(w []string) string {
	name := y.vars["T"]
	kind, w := w[0], w[1:]
	channel := "ch"
	if len(w) > 0 && !strings.HasPrefix(w[0], "none") && !strings.ContainsAny(w[0], "=<>") {
		if kind == "topic" {
			name = w[0]
		} else {
			channel = w[0]
		}
		w = w[1:]
	}
	found := y.stats(name, "topics", "topic_name")
	if kind == "ch" && found != nil {
		found = find(found["channels"], "channel_name", channel)
	}
	if len(w) > 0 && w[0] == "none" {
		if found != nil {
			return fmt.Sprintf("there is %v", found)
		}
		return ""
	}
	if len(w) > 0 && w[0] == "none-or" {
		if found == nil {
			return ""
		}
		w = w[1:]
	}
	if found == nil {
		return fmt.Sprintf("no %s (topic %s, channel %s)", kind, name, channel)
	}
	for _, condition := range w {
		i := strings.IndexAny(condition, "<>=")
		key, op, want := condition[:i], condition[i:i+1], strings.TrimLeft(condition[i:], "<>=")
		value := any(found[key])
		if member, is := strings.CutPrefix(key, "client."); is {
			clients, _ := found["clients"].([]any)
			if len(clients) != 1 {
				return fmt.Sprintf("%d clients: %v", len(clients), found)
			}
			value = clients[0].(map[string]any)[member]
		}
		if list, is := value.([]any); is {
			value = len(list)
		}
		got := fmt.Sprint(value)
		a, _ := strconv.ParseFloat(got, 64)
		b, _ := strconv.ParseFloat(want, 64)
		if op == "=" && got != want || op == ">" && a < b || op == "<" && a > b {
			return fmt.Sprintf("%s is %s, want %s: %v", key, got, condition, found)
		}
	}
	return ""
}

func (y *player) stats(topic, list, key string) map[string]any {
	r := y.n.get(y.t, "/stats?format=json&topic="+strings.ReplaceAll(topic, "#", "%23"))
	var all map[string]any
	d := json.NewDecoder(strings.NewReader(r.body))
	d.UseNumber()
	if err := d.Decode(&all); err != nil {
		y.t.Fatalf("/stats: %.200q: %v", r.body, err)
	}
	return find(all[list], key, topic)
}

func find(list any, key, name string) map[string]any {
	all, _ := list.([]any)
	for _, one := range all {
		if o, _ := one.(map[string]any); o[key] == name {
			return o
		}
	}
	return nil
}

// message checks a received message: attempts=2, as=other for the same message again, not=other for
// another message.
func (y *player) message(name string, w []string) {
	y.t.Helper()
	m := y.messages[name]
	for _, condition := range w {
		key, value, _ := strings.Cut(condition, "=")
		switch key {
		case "attempts":
			if int(m.attempts) != y.number(value) {
				y.t.Errorf("attempts %d, want %s", m.attempts, value)
			}
		case "stamp": // between the mark and now
			if m.stamp.Before(y.mark) || m.stamp.After(time.Now()) {
				y.t.Errorf("timestamp %v is not between %v and now", m.stamp, y.mark)
			}
		case "id": // 16 lower-case hexadecimal digits
			if _, err := hex.DecodeString(m.id); err != nil || strings.ToLower(m.id) != m.id {
				y.t.Errorf("id %q is not hexadecimal", m.id)
			}
		case "not":
			if m.id == y.messages[value].id {
				y.t.Errorf("%+v is %s", m, value)
			}
		case "as":
			if first := y.messages[value]; m.id != first.id || !m.stamp.Equal(first.stamp) {
				y.t.Errorf("%+v is not %+v again", m, first)
			}
		default:
			y.t.Fatalf("message %s: %q", name, condition)
		}
	}
}

// peer returns a connection. The first use of a name opens the connection.
func (y *player) peer(name string) *peer {
	y.t.Helper()
	p := y.peers[name]
	if p == nil {
		p = y.n.open(y.t)
		y.peers[name] = p
	}
	return p
}

// id returns the id of a received message, or the word itself.
func (y *player) id(name string) string {
	if m, known := y.messages[name]; known {
		return m.id
	}
	return name
}

// connection carries out a step of a connection.
func (y *player) connection(name, do string, w []string) {
	t := y.t
	t.Helper()
	if do == "dial" { // no magic
		y.peers[name] = y.n.dial(t)
		return
	}
	p := y.peer(name)
	arg := func(i int) string {
		if i < len(w) {
			return w[i]
		}
		return ""
	}
	taken := func(m delivery, name string) {
		if y.messages[name] = m; name != "" {
			y.vars[name] = m.id
		}
	}
	topic := y.vars["T"]
	switch do {
	case "send": // raw bytes
		p.raw([]byte(y.pieces(w)))
	case "sized": // a line, and a body with its size
		p.raw(sized(arg(0), y.pieces(w[1:])))
	case "claimed": // a line, a size, and a body whose length may differ
		p.raw(claimed(arg(0), int32(y.number(arg(1))), y.pieces(w[2:])))
	case "slowly": // from here on, byte by byte
		p.w = bytewise{p.w}
	case "hold": // keeps its output until release
		p.w = new(bytes.Buffer)
	case "go":
		held := p.w.(*bytes.Buffer).Bytes()
		p.w = p.nc
		p.raw(held)
	case "sub":
		p.sub(topic, arg(0))
	case "pub":
		p.pub(topic, w...)
	case "mpub":
		p.mpub(topic, w...)
	case "dpub":
		p.dpub(topic, time.Duration(y.number(arg(0)))*time.Millisecond, arg(1))
	case "rdy":
		p.rdy(y.number(arg(0)))
	case "fin":
		p.fin(y.id(arg(0)))
	case "req":
		p.req(y.id(arg(0)), time.Duration(y.number(arg(1)))*time.Millisecond)
	case "touch":
		p.touch(y.id(arg(0)))
	case "cls":
		p.send("CLS\n")
		p.response("CLOSE_WAIT")
	case "held": // subscribes, and takes a message x, with RDY 1
		p.sub(topic, "ch").rdy(1)
		y.n.publish(t, topic, "x")
		taken(p.body("x"), arg(0))
	case "take": // body [name]
		taken(p.body(arg(0)), arg(1))
	case "next": // any body [name]
		taken(p.message(), arg(0))
	case "some": // so many, not finished
		for range y.number(arg(0)) {
			p.message()
		}
	case "bodies": // finishes the messages, in any order
		testkit.EqualSlices(t, p.bodies(len(w)), w)
	case "delayed": // late other: in any order, the late message at least so many ms after the mark
		y.messages["late"] = p.notBefore(y.mark, time.Duration(y.number(arg(2)))*time.Millisecond, arg(0), arg(1))
	case "ok":
		count := 1
		if len(w) > 0 {
			count = y.number(w[0])
		}
		p.oks(count)
	case "response":
		p.response(arg(0))
	case "fault": // code [part of the text]
		if text := p.fault(arg(0)); !strings.Contains(text, arg(1)) {
			t.Errorf("text %q does not have %q", text, arg(1))
		}
	case "fatal":
		p.fatal(arg(0))
	case "closed":
		p.closed()
	case "hungup":
		p.hungUp()
	case "quiet":
		p.quiet()
	case "alive":
		p.alive(y.n)
	case "round":
		p.round(y.n)
	case "close":
		p.nc.Close()
		delete(y.peers, name)
	case "beats": // from here on, heartbeats are returned and not answered
		p.beats = true
	case "squeeze": // algorithm level: continues with compression
		p.squeeze(arg(0), y.number(arg(1)))
	case "address": // the connection's address becomes $address, and $host
		y.vars["address"] = p.nc.LocalAddr().String()
		y.vars["host"], _, _ = strings.Cut(y.vars["address"], ":")
	case "identify", "identity": // with, and without feature negotiation; members of the answer
		var fields map[string]any
		if err := json.Unmarshal([]byte(arg(0)), &fields); err != nil {
			t.Fatalf("%s: %v", arg(0), err)
		}
		if do == "identity" {
			p.raw(identity(t, fields))
			break
		}
		answer := p.identify(fields)
		for _, condition := range w[1:] {
			key, want, _ := strings.Cut(condition, "=")
			testkit.Equal(t, fmt.Sprint(answer[key]), want, "%s", key)
		}
	default:
		t.Fatalf("no step %q", do)
	}
}

// bytewise writes each byte separately.
type bytewise struct {
	w interface{ Write([]byte) (int, error) }
}

func (b bytewise) Write(all []byte) (n int, err error) {
	for i := range all {
		if _, err := b.w.Write(all[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(all), nil
}
