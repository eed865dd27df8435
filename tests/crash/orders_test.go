package crash

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/wire"
)

// depths returns the messages of a topic's channels, including messages in flight or deferred; nil
// without the topic.
func depths(t *testing.T, d *local.Process, topic string) map[string]int {
	t.Helper()
	_, body := ask(t, "http://"+d.HTTP+"/stats?format=json&include_clients=false&topic="+topic, "")
	var all struct {
		Topics []struct {
			Channels []struct {
				Name string `json:"channel_name"`
				state
			}
		}
	}
	testkit.Must(t, json.Unmarshal([]byte(body), &all))
	if len(all.Topics) == 0 {
		return nil
	}
	n := map[string]int{}
	for _, c := range all.Topics[0].Channels {
		n[c.Name] = c.Depth + c.InFlight + c.Deferred
	}
	return n
}

// message returns the next message.
func message(t *testing.T, nc net.Conn, r io.Reader) wire.Message {
	t.Helper()
	return testkit.Result(nextMessage(nc, r)).Must(t)
}

// Acknowledged changes survive a kill: messages with their due times and attempts, and the orders to
// empty, seek and delete. Ephemeral channels are gone.
func TestKillAfterOrders(t *testing.T) {
	for _, flag := range []string{"--durability=fsync", "--mem-queue-size=0"} {
		t.Run(flag, func(t *testing.T) {
			for range size(t, "SRTM_CRASH_ORDERS", 1) {
				killAfterOrders(t, flag)
			}
		})
	}
}

func killAfterOrders(t *testing.T, flag string) {
	dir := t.TempDir()
	d := withChannel(t, dir, flag)
	order := func(format string, args ...any) {
		t.Helper()
		if code, answer := ask(t, "http://"+d.HTTP+fmt.Sprintf(format, args...), "x"); code != http.StatusOK {
			t.Fatalf(format+": %d %s", append(args, code, answer)...)
		}
	}
	for _, c := range []string{"emptied", "deleted", "remade", "sought"} {
		order("/channel/create?topic=t&channel=%s", c)
	}
	order("/topic/create?topic=gone")
	order("/channel/create?topic=gone&channel=c")
	order("/pub?topic=gone")

	sub := subscribe(t, d.TCP, 0)
	defer sub.Close()
	answers := bufio.NewReader(sub)
	testkit.Result(reply(sub, answers)).MustEqual(t, "OK")
	ephemeral := testkit.Result(dial(d.TCP)).Must(t)
	defer ephemeral.Close()
	testkit.Result(ephemeral.Write(wire.AppendSub(nil, "t", "e#ephemeral"))).Must(t)
	testkit.Result(reply(ephemeral, ephemeral)).MustEqual(t, "OK")
	const published, late = 6, 1500 * time.Millisecond
	pub, err := dial(d.TCP)
	testkit.Must(t, err)
	defer pub.Close()
	var due [published]time.Time // 0: at once
	for n := range uint32(published) {
		b := wire.AppendPub(nil, "t", body(0, n)[4:])
		if n == published-1 {
			b = wire.AppendPub([]byte("D"), fmt.Sprint("t ", late.Milliseconds()), body(0, n)[4:])
			due[n] = time.Now().Add(late)
		}
		testkit.Result(pub.Write(b)).Must(t)
		testkit.Result(reply(pub, pub)).MustEqual(t, "OK")
	}

	// Of the delivered messages, 0 is finished, 1 is requeued for later, and 2 is requeued at once.
	_, err = sub.Write(wire.AppendRdy(nil, 3))
	testkit.Must(t, err)
	held := []wire.Message{message(t, sub, answers), message(t, sub, answers), message(t, sub, answers)}
	if _, err := sub.Write(wire.AppendRdy(nil, 0)); err != nil { // no others
		t.Fatal(err)
	}
	for n, m := range held {
		b := wire.AppendFin(nil, m.ID)
		switch n {
		case 1:
			b = fmt.Appendf(nil, "REQ %s %d\n", m.ID, late.Milliseconds())
			due[n] = time.Now().Add(late)
		case 2:
			b = fmt.Appendf(nil, "REQ %s 0\n", m.ID)
		}
		testkit.Result(sub.Write(b)).Must(t)
	}
	testkit.WaitFor(t, "given back", func() bool { return channel(t, d).Deferred == 2 })
	order("/channel/delete?topic=t&channel=deleted")
	order("/channel/delete?topic=t&channel=remade")
	order("/channel/create?topic=t&channel=remade")
	order("/channel/empty?topic=t&channel=emptied")
	order("/channel/seek?topic=t&channel=sought&to=4") // the seek also saves c's progress
	order("/topic/delete?topic=gone")
	testkit.Must(t, d.Kill())

	d = testkit.Result(local.NSQD(localtest.Program(t, "nsqd"), dir, "--data-path="+dir, flag)).Must(t)
	defer func() {
		testkit.NoError(t, d.Stop())
	}()
	want := map[string]int{"c": published - 1, "emptied": 0, "remade": 0, "sought": 2}
	if got := depths(t, d, "t"); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("channels %v, want %v", got, want)
	}
	if got := depths(t, d, "gone"); got != nil {
		t.Errorf("a topic is back that was deleted, with %v", got)
	}
	rest := subscribe(t, d.TCP, 10)
	defer rest.Close()
	r := bufio.NewReader(rest)
	var got []uint32
	for len(got) < published-1 {
		m := message(t, rest, r)
		n := number(m)
		got = append(got, n)
		attempts := uint16(1)
		if n == 1 || n == 2 {
			attempts = 2
		}
		testkit.Equal(t, m.Attempts, attempts, "attempts of %d", n)
		if early := time.Until(due[n]); !due[n].IsZero() && early > 100*time.Millisecond { // allows for steps of the clocks
			t.Errorf("%d is early by %v", n, early)
		}
		testkit.Result(rest.Write(wire.AppendFin(nil, m.ID))).Must(t)
	}
	slices.Sort(got)
	testkit.EqualSlices(t, got, []uint32{1, 2, 3, 4, 5})
}
