package lookup_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/lookup"
	"github.com/srtm-io/srtm/loaddistributor/registry"
)

// envNSQLookupd names an nsqlookupd binary to compare the transcript with.
const envNSQLookupd = "SRTM_LOOKUP_NSQLOOKUPD"

// deliberate lists the intended differences from nsqlookupd 1.3: the line of the script, and the
// reason.
var deliberate = map[string]string{
	"b: close":    whyEphemeral,
	"GET /topics": whyEphemeral,
}

const whyEphemeral = "an ephemeral topic goes with its last producer, also when that just disconnects"

// script is the lines of nodes (a name, then a line; every node but nobody sends IDENTIFY first) and
// the HTTP requests.
var script = []string{
	"nobody: PING", "nobody: REGISTER t c",
	"magic: ", "foo: FOO", "lower: ping", "empty: ", "twice: IDENTIFY",
	"noargs: REGISTER", "noargs2: UNREGISTER", "topic: REGISTER bad!topic", "channel: REGISTER t bad!ch", "space: REGISTER  t",
	"json: BODY x{", "list: BODY []", "missing: BODY {}", `type: BODY {"tcp_port":"1"}`,
	"a: PING", "a: PING x", "a: REGISTER t1", "a: REGISTER t1 c1", "a: REGISTER t1 c2", "a: REGISTER t2 only", "a: REGISTER e1#ephemeral x#ephemeral", "a: REGISTER t1",
	"b: REGISTER t1 c3", "b: REGISTER e2#ephemeral", "a: UNREGISTER never", "a: UNREGISTER never c",
	"a: UNREGISTER e1#ephemeral x#ephemeral", "a: UNREGISTER e1#ephemeral", "a: UNREGISTER t2 only", "a: UNREGISTER t2", "a: UNREGISTER t1 c1",
	"GET /ping", "POST /ping", "GET /", "GET /nothing", "POST /lookup?topic=t1", "HEAD /topics", "OPTIONS /topics", "OPTIONS /topic/create",
	"GET /lookup", "GET /lookup?topic=", "GET /lookup?topic=nobody", "GET /lookup?topic=bad!", "GET /lookup?topic=" + strings.Repeat("x", 80),
	"GET /channels", "GET /channels?topic=nobody", "GET /channels?topic=t1",
	"POST /topic/create", "POST /topic/create?topic=bad!", "POST /topic/create?topic=made", "GET /topic/create?topic=made", "PUT /topic/create?topic=made",
	"POST /channel/create?topic=made", "POST /channel/create?channel=c", "POST /channel/create?topic=bad!&channel=c", "POST /channel/create?topic=made&channel=bad!", "POST /channel/create?topic=made2&channel=c",
	"GET /lookup?topic=made", "GET /lookup?topic=made2",
	"POST /channel/delete?topic=made2", "POST /channel/delete?topic=made2&channel=x", "POST /channel/delete?topic=never&channel=x", "POST /channel/delete?topic=made2&channel=c",
	"POST /topic/delete", "POST /topic/delete?topic=made2", "POST /topic/delete?topic=never", "POST /topic/delete?topic=bad!", "GET /topic/delete?topic=made",
	"POST /topic/tombstone", "POST /topic/tombstone?topic=t1", "POST /topic/tombstone?topic=t1&node=10.0.0.1:4150", "GET /lookup?topic=t1",
	"POST /topic/tombstone?topic=never&node=10.0.0.1:4151", "POST /topic/tombstone?topic=t1&node=10.0.0.1:4151", "GET /lookup?topic=t1", "GET /nodes",
	"a: UNREGISTER t1", "a: REGISTER t1 c1", "GET /lookup?topic=t1", "GET /nodes",
	"GET /topics?before", "b: close", "GET /lookup?topic=t1", "GET /topics",
	"POST /channel/delete?topic=t1&channel=c1", "POST /topic/delete?topic=t1", "GET /lookup?topic=t1", "GET /nodes", "GET /topics",
	"a: REGISTER t1", "GET /lookup?topic=t1", "GET /nodes",
}

// target is a running registry: ours in this process, or another program.
type target struct{ tcp, http string }

// play runs the script and returns the answers, a paragraph for each line.
func play(t *testing.T, server target) map[string]string {
	t.Helper()
	conns := map[string]net.Conn{}
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	answers := map[string]string{}
	for i, line := range script {
		name, words, isNode := strings.Cut(line, ": ")
		got := ""
		if !isNode {
			method, path, _ := strings.Cut(line, " ")
			got = request(t, method, "http://"+server.http+path)
		} else {
			got = sendLine(t, server.tcp, conns, name, words)
		}
		if name == "b" && words == "close" {
			// The end of a connection has no answer: wait until the effect shows.
			testkit.WaitFor(t, "a node that has gone is shown no more", func() bool {
				return !strings.Contains(request(t, http.MethodGet, "http://"+server.http+"/nodes"), "10.0.0.2")
			})
			got = request(t, http.MethodGet, "http://"+server.http+"/topics")
		}
		answers[fmt.Sprintf("%03d %s", i, line)] = got
	}
	return answers
}

// sendLine makes a node send a line and returns the answer.
func sendLine(t *testing.T, address string, conns map[string]net.Conn, name, words string) string {
	t.Helper()
	conn, open := conns[name]
	if !open {
		conn = testkit.Result(net.Dial("tcp", address)).Must(t)
		conns[name] = conn
		if name == "magic" {
			return exchange(t, conn, "  V9")
		}
		send(t, conn, "  V1")
		if body, raw := strings.CutPrefix(words, "BODY "); raw {
			return exchange(t, conn, identifying(body))
		}
		if name != "nobody" {
			if answer := exchange(t, conn, identifying(introduction(name))); !strings.HasPrefix(answer, "{") {
				t.Fatalf("%s: IDENTIFY: %s", name, answer)
			}
		}
	}
	switch words {
	case "close":
		conn.Close()
		return ""
	case "IDENTIFY":
		return exchange(t, conn, identifying(introduction(name)))
	}
	return exchange(t, conn, words+"\n")
}

func introduction(name string) string {
	last := map[string]int{"a": 1, "b": 2}[name]
	return fmt.Sprintf(`{"broadcast_address":"10.0.0.%d","hostname":"%s","http_port":4151,"tcp_port":4150,"version":"1.3.0"}`, last, name)
}

func identifying(body string) string {
	return "IDENTIFY\n" + string(binary.BigEndian.AppendUint32(nil, uint32(len(body)))) + body
}

func send(t *testing.T, conn net.Conn, text string) {
	t.Helper()
	testkit.Result(io.WriteString(conn, text)).Must(t)
}

// exchange returns the answer, and after an error whether the connection ended.
func exchange(t *testing.T, conn net.Conn, text string) string {
	t.Helper()
	send(t, conn, text)
	testkit.Must(t, conn.SetReadDeadline(time.Now().Add(testkit.Hang)))
	read := func(n int) []byte {
		b := make([]byte, n)
		if _, err := io.ReadFull(conn, b); err != nil {
			t.Fatalf("after %.40q: %v", text, err)
		}
		return b
	}
	var answer string
	if strings.HasPrefix(text, "  V") {
		answer = string(read(len("E_BAD_PROTOCOL") + 4)[4:])
	} else {
		answer = string(read(int(binary.BigEndian.Uint32(read(4)))))
	}
	if strings.HasPrefix(answer, "E_") {
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("after %s the connection is still open: %v", answer, err)
		}
	}
	return answer
}

// request returns an answer over HTTP without its variable parts, and with sorted lists.
func request(t *testing.T, method, url string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	req := testkit.Result(http.NewRequestWithContext(ctx, method, url, nil)).Must(t)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res := testkit.Result(client.Do(req)).Must(t)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	testkit.Must(t, err)
	text := fmt.Sprintf("%d type=%s nsq=%s allow=%s", res.StatusCode, res.Header.Get("Content-Type"), res.Header.Get("X-NSQ-Content-Type"), res.Header.Get("Allow"))
	if len(body) == 0 {
		return text
	}
	var parsed map[string]any
	if json.Unmarshal(body, &parsed) != nil {
		return text + " " + string(body)
	}
	for _, value := range parsed {
		list, _ := value.([]any)
		for _, item := range list {
			if p, ok := item.(map[string]any); ok {
				if _, _, err := net.SplitHostPort(p["remote_address"].(string)); err != nil {
					t.Errorf("%s: remote address: %v", url, err)
				}
				p["remote_address"] = "-"
				pair(p)
			}
		}
		slices.SortFunc(list, func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	}
	sorted := testkit.Result(json.Marshal(parsed)).Must(t)
	return text + " " + string(sorted)
}

// pair sorts a node's topics together with their tombstones.
func pair(node map[string]any) {
	topics, ok := node["topics"].([]any)
	if !ok {
		return
	}
	var pairs []any
	for i, stone := range node["tombstones"].([]any) {
		pairs = append(pairs, fmt.Sprintf("%v %v", topics[i], stone))
	}
	slices.SortFunc(pairs, func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	node["topics"], node["tombstones"] = pairs, "with the topics"
}

// paragraphs lays answers out in the order of the script.
func paragraphs(answers map[string]string) []byte {
	var b bytes.Buffer
	for i, line := range script {
		key := fmt.Sprintf("%03d %s", i, line)
		fmt.Fprintf(&b, "%s\n    %s\n", key, answers[key])
	}
	return b.Bytes()
}

// serve runs a directory without a cluster until t ends.
func serve(t *testing.T, cluster lookup.Cluster, cfg registry.Config) target {
	t.Helper()
	dir := lookup.NewDirectory(cluster, cfg)
	mux := http.NewServeMux()
	lookup.Mount(mux, dir, "0.1.0", nil)
	web := httptest.NewServer(mux)
	t.Cleanup(web.Close)
	ln := testkit.Listen(t)
	nodes := lookup.NewNodes(dir, cfg, slog.New(slog.DiscardHandler), nil)
	testkit.Run(t, func(ctx context.Context) error { return nodes.Run(ctx, ln) })
	return target{tcp: ln.Addr().String(), http: strings.TrimPrefix(web.URL, "http://")}
}

func TestTranscript(t *testing.T) {
	testkit.Golden(t, "testdata/transcript.txt", paragraphs(play(t, serve(t, directory{}, registry.Config{}))))
}

// Our answers equal nsqlookupd's answers, apart from the deliberate differences.
func TestTranscriptOfNSQLookupd(t *testing.T) {
	path := os.Getenv(envNSQLookupd)
	if path == "" {
		t.Skipf("no %s: the transcript is compared with that of an earlier run only", envNSQLookupd)
	}
	reference := target{tcp: testkit.Address(t), http: testkit.Address(t)}
	cmd := exec.Command(path, "-tcp-address="+reference.tcp, "-http-address="+reference.http)
	cmd.Dir = t.TempDir()
	testkit.Must(t, cmd.Start())
	defer func() {
		_ = cmd.Process.Kill() // the process may have ended
		_ = cmd.Wait()         // the killed process returns an error
	}()
	testkit.WaitFor(t, "theirs listens", func() bool {
		conn, err := net.Dial("tcp", reference.http)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	got, want := play(t, serve(t, directory{}, registry.Config{})), play(t, reference)
	for i, line := range script {
		key := fmt.Sprintf("%03d %s", i, line)
		if got[key] == want[key] {
			continue
		}
		if reason := deliberate[line]; reason != "" {
			t.Logf("%s: deliberate: %s", line, reason)
			continue
		}
		t.Errorf("%s (%s)\nours   %s\ntheirs %s", key, filepath.Base(path), got[key], want[key])
	}
}
