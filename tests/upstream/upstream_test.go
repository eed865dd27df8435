package upstream

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// admin is an nsqadmin and its address.
type admin struct{ address string }

func startAdmin(t *testing.T, flags ...string) admin {
	t.Helper()
	address := localtest.Ports(t, 1)[0]
	localtest.Run(t, testkit.Upstream(t, "nsqadmin"), address+"/ping", append(flags, "--http-address="+address)...)
	return admin{address}
}

// get decodes the answer of an API path.
func (a admin) get(t *testing.T, path string) (answer map[string]any) {
	t.Helper()
	testkit.Must(t, json.Unmarshal([]byte(localtest.MustAsk(t, http.MethodGet, "http://"+a.address+"/api"+path, "")), &answer))
	return answer
}

// do sends an action, as a click on a page does.
func (a admin) do(t *testing.T, method, path, body string) {
	t.Helper()
	localtest.MustAsk(t, method, "http://"+a.address+"/api"+path, body)
}

// shows waits until right accepts the answer of an API path.
func (a admin) shows(t *testing.T, path, what string, right func(map[string]any) bool) {
	t.Helper()
	var last map[string]any
	defer func() {
		if t.Failed() {
			t.Logf("%s shows %v", path, last)
		}
	}()
	testkit.WaitFor(t, what, func() bool {
		text, code, err := localtest.Ask(http.MethodGet, "http://"+a.address+"/api"+path, "")
		if err != nil || code != http.StatusOK {
			return false
		}
		last = nil
		testkit.Must(t, json.Unmarshal([]byte(text), &last))
		return right(last)
	})
}

// names returns the names in a list of objects or strings.
func names(list any, key string) (all []string) {
	items, _ := list.([]any)
	for _, item := range items {
		switch item := item.(type) {
		case string:
			all = append(all, item)
		case map[string]any:
			all = append(all, fmt.Sprint(item[key]))
		}
	}
	slices.Sort(all)
	return all
}

// operate does what the buttons of nsqadmin do with topic t. Its channel c exists and holds two
// messages.
func operate(t *testing.T, a admin) {
	t.Helper()
	a.shows(t, "/topics", "topic t", func(m map[string]any) bool { return slices.Contains(names(m["topics"], ""), "t") })
	a.shows(t, "/topics/t", "channel c", func(m map[string]any) bool {
		return slices.Equal(names(m["channels"], "channel_name"), []string{"c"})
	})
	a.shows(t, "/topics/t/c", "2 messages", func(m map[string]any) bool { return m["depth"] == 2.0 })

	a.do(t, http.MethodPost, "/topics/t/c", `{"action":"pause"}`)
	a.shows(t, "/topics/t/c", "a paused channel", func(m map[string]any) bool { return m["paused"] == true })
	a.do(t, http.MethodPost, "/topics/t/c", `{"action":"unpause"}`)
	a.shows(t, "/topics/t/c", "a channel that is not paused", func(m map[string]any) bool { return m["paused"] == false })
	a.do(t, http.MethodPost, "/topics/t/c", `{"action":"empty"}`)
	a.shows(t, "/topics/t/c", "no messages", func(m map[string]any) bool { return m["depth"] == 0.0 })
	a.do(t, http.MethodDelete, "/topics/t/c", "")
	a.shows(t, "/topics/t", "no channel", func(m map[string]any) bool { return len(names(m["channels"], "channel_name")) == 0 })
}

// pause does what the pause buttons of nsqadmin do with topic t.
func pause(t *testing.T, a admin) {
	t.Helper()
	a.do(t, http.MethodPost, "/topics/t", `{"action":"pause"}`)
	a.shows(t, "/topics/t", "a paused topic", func(m map[string]any) bool { return m["paused"] == true })
	a.do(t, http.MethodPost, "/topics/t", `{"action":"empty"}`)
	a.do(t, http.MethodPost, "/topics/t", `{"action":"unpause"}`)
	a.shows(t, "/topics/t", "a topic that is not paused", func(m map[string]any) bool { return m["paused"] == false })
}

func TestNsqadminOperatesACluster(t *testing.T) {
	c := localtest.Start(t, 2, []string{"--fitting=off"}, "--mcap=20000")
	localtest.Srtm(t, c.RPC, "topic", "create", "t", "--rate=1000", "--burst=100", "--group=g:10:10")
	a := startAdmin(t, "--lookupd-http-address="+c.Web)
	if nodes := names(a.get(t, "/nodes")["nodes"], "broadcast_address"); len(nodes) != 2 {
		t.Errorf("nsqadmin shows the nodes %v, want 2", nodes)
	}
	carrier := ""
	testkit.WaitFor(t, "the broker of topic t", func() bool {
		for _, b := range c.Brokers {
			if text, _, err := localtest.Ask(http.MethodGet, "http://"+b.HTTP+"/stats?format=json&topic=t", ""); err == nil && strings.Contains(text, `"topic_name":"t"`) {
				carrier = b.HTTP
			}
		}
		return carrier != ""
	})
	localtest.MustAsk(t, http.MethodPost, "http://"+carrier+"/channel/create?topic=t&channel=c", "")
	localtest.MustAsk(t, http.MethodPost, "http://"+carrier+"/mpub?topic=t", "one\ntwo")
	operate(t, a)
	pause(t, a)
	text, _, err := localtest.Ask(http.MethodDelete, "http://"+a.address+"/api/topics/t", "")
	testkit.Must(t, err)
	if !strings.Contains(text, "srtm topic delete t") {
		t.Errorf("nsqadmin does not say how to delete a topic of the cluster: %s", text)
	}
}

func TestNsqadminOperatesOneBroker(t *testing.T) {
	d := localtest.NSQD(t, "")
	a := startAdmin(t, "--nsqd-http-address="+d.HTTP)
	localtest.MustAsk(t, http.MethodPost, "http://"+d.HTTP+"/topic/create?topic=t", "")
	localtest.MustAsk(t, http.MethodPost, "http://"+d.HTTP+"/channel/create?topic=t&channel=c", "")
	localtest.MustAsk(t, http.MethodPost, "http://"+d.HTTP+"/mpub?topic=t", "one\ntwo")
	operate(t, a)
	pause(t, a)
	a.do(t, http.MethodDelete, "/topics/t", "")
	a.shows(t, "/topics", "no topic", func(m map[string]any) bool { return len(names(m["topics"], "")) == 0 })
}

// tail returns the count messages that nsq_tail prints.
func tail(t *testing.T, nsqd, topic string, count int) (lines []string) {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), testkit.Upstream(t, "nsq_tail"),
		"--nsqd-tcp-address="+nsqd, "--topic="+topic, "--channel=c", fmt.Sprint("-n=", count)).Output()
	testkit.Must(t, err)
	for line := range strings.Lines(string(output)) {
		lines = append(lines, strings.TrimSuffix(line, "\n"))
	}
	slices.Sort(lines)
	return lines
}

// texts returns a number of messages, in alphabetical order.
func texts(count int) (all []string) {
	for i := range count {
		all = append(all, fmt.Sprintf("message %03d", i))
	}
	return all
}

func TestToNsqAndNsqTail(t *testing.T) {
	d := localtest.NSQD(t, "")
	localtest.MustAsk(t, http.MethodPost, "http://"+d.HTTP+"/topic/create?topic=t", "")
	localtest.MustAsk(t, http.MethodPost, "http://"+d.HTTP+"/channel/create?topic=t&channel=c", "")
	want := texts(100)
	cmd := exec.CommandContext(t.Context(), testkit.Upstream(t, "to_nsq"), "--nsqd-tcp-address="+d.TCP, "--topic=t")
	cmd.Stdin = strings.NewReader(strings.Join(want, "\n") + "\n")
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("to_nsq: %v\n%s", err, output)
	}
	testkit.EqualSlices(t, tail(t, d.TCP, "t", 100), want, "messages")
}

func TestNsqStatReadsOurStats(t *testing.T) {
	d := localtest.NSQD(t, "")
	localtest.MustAsk(t, http.MethodPost, "http://"+d.HTTP+"/topic/create?topic=t", "")
	localtest.MustAsk(t, http.MethodPost, "http://"+d.HTTP+"/channel/create?topic=t&channel=c", "")
	localtest.MustAsk(t, http.MethodPost, "http://"+d.HTTP+"/mpub?topic=t", strings.Join(texts(7), "\n"))
	cmd := exec.CommandContext(t.Context(), testkit.Upstream(t, "nsq_stat"),
		"--nsqd-http-address="+d.HTTP, "--topic=t", "--channel=c", "--interval=10ms", "--count=1")
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("nsq_stat: %v\n%s", err, output)
	}
	// The columns of a row are ingress, egress, a bar, the total depth, ...
	rows := bytes.Split(bytes.TrimSpace(output), []byte("\n"))
	if fields := strings.Fields(string(rows[len(rows)-1])); len(fields) < 4 || fields[3] != "7" {
		t.Errorf("nsq_stat printed\n%s, want a depth of 7", output)
	}
}

// A user replaces NSQ's nsqd by ours on the same data folder.
func TestAFolderOfUpstreamIsTakenOver(t *testing.T) {
	dir, want := t.TempDir(), texts(500)
	before, err := local.NSQD(testkit.Upstream(t, "nsqd"), dir, "--mem-queue-size=10")
	testkit.Must(t, err)
	localtest.MustAsk(t, http.MethodPost, "http://"+before.HTTP+"/topic/create?topic=t", "")
	localtest.MustAsk(t, http.MethodPost, "http://"+before.HTTP+"/channel/create?topic=t&channel=c", "")
	localtest.MustAsk(t, http.MethodPost, "http://"+before.HTTP+"/mpub?topic=t", strings.Join(want, "\n"))
	testkit.Must(t, before.Stop())

	after, err := local.NSQD(localtest.Program(t, "nsqd"), dir)
	localtest.Watch(t, after, err)
	testkit.EqualSlices(t, tail(t, after.TCP, "t", len(want)), want, "messages")
}
