package registry

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
)

// check fails when an invariant is broken.
func (r *Registry) check(t interface{ Fatalf(string, ...any) }) {
	names := len(r.topics)
	for name, one := range r.topics {
		names += len(one.channels)
		for id := range one.producers {
			if !r.nodes[id].keys[key{topic: name}] {
				t.Fatalf("node %d produces %s and does not know it", id, name)
			}
		}
		for channel, holders := range one.channels {
			for id := range holders {
				if !r.nodes[id].keys[key{name, channel}] || !one.producers[id] {
					t.Fatalf("node %d has %s/%s and does not know it, or does not produce it", id, name, channel)
				}
			}
		}
	}
	if names != r.names {
		t.Fatalf("%d names are counted, there are %d", r.names, names)
	}
	for id, n := range r.nodes {
		for k := range n.keys {
			one := r.topics[k.topic]
			if one == nil || k.channel == "" && !one.producers[id] || k.channel != "" && !one.channels[k.channel][id] {
				t.Fatalf("node %d believes that it has %v", id, k)
			}
		}
	}
}

// scene drives a registry in a test.
type scene struct {
	t   *testing.T
	r   *Registry
	now mono.Time
}

func newScene(t *testing.T, cfg Config) *scene { return &scene{t: t, r: New(cfg), now: 1e9} }

// join connects a node and sends its identity.
func (s *scene) join(host string, port int) ID {
	s.t.Helper()
	id := testkit.Result(s.r.Join(s.now, "192.0.2.1:1")).Must(s.t)
	_, err := s.r.Handle(s.now, id, Command{Verb: Identify, Node: Node{BroadcastAddress: host, TCPPort: port, HTTPPort: port + 1, Version: "1"}})
	testkit.Must(s.t, err)
	return id
}

// send has a node send a line, and checks the invariants.
func (s *scene) send(id ID, line string) error {
	s.t.Helper()
	c, n, err := Parse([]byte(line + "\n"))
	if err != nil || n == 0 {
		s.t.Fatalf("%q: %v", line, err)
	}
	answer, err := s.r.Handle(s.now, id, c)
	if err == nil && string(answer) != "OK" {
		s.t.Errorf("%q: answered %q", line, answer)
	}
	s.r.check(s.t)
	return err
}

func (s *scene) sendAll(id ID, lines ...string) {
	s.t.Helper()
	for _, line := range lines {
		if err := s.send(id, line); err != nil {
			s.t.Errorf("%q: %v", line, err)
		}
	}
}

// check compares the known hosts and channels of a topic.
func (s *scene) check(topic, want string) {
	s.t.Helper()
	nodes, channels, found := s.r.Producers(s.now, topic)
	var hosts []string
	for _, n := range nodes {
		hosts = append(hosts, n.BroadcastAddress)
	}
	got := "unknown"
	if found {
		got = strings.Join(hosts, ",") + " " + strings.Join(channels, ",")
	}
	testkit.Equal(s.t, got, want, "%s", topic)
}

func TestWhoMustIdentify(t *testing.T) {
	s := newScene(t, Config{Self: Node{BroadcastAddress: "me", Hostname: "h", HTTPPort: 4161, TCPPort: 4160, Version: "9"}})
	id, err := s.r.Join(s.now, "192.0.2.1:1")
	testkit.Must(t, err)
	s.sendAll(id, "PING")
	for _, line := range []string{"REGISTER t", "UNREGISTER t"} {
		if err := s.send(id, line); err == nil || err.Error() != "E_INVALID client must IDENTIFY" {
			t.Errorf("%s: %v", line, err)
		}
	}
	if nodes := s.r.Nodes(s.now); len(nodes) != 0 {
		t.Errorf("a producer without a name is shown: %+v", nodes)
	}
	hello := Command{Verb: Identify, Node: Node{BroadcastAddress: "a", TCPPort: 1, HTTPPort: 2, Version: "1"}}
	answer, err := s.r.Handle(s.now, id, hello)
	if want := `{"broadcast_address":"me","hostname":"h","http_port":4161,"tcp_port":4160,"version":"9"}`; err != nil || string(answer) != want {
		t.Errorf("%s, %v; want %s", answer, err, want)
	}
	if _, err := s.r.Handle(s.now, id, hello); err == nil || err.Error() != "E_INVALID cannot IDENTIFY again" {
		t.Errorf("the second time: %v", err)
	}
}

func TestSilentNodesAreNotShown(t *testing.T) {
	s := newScene(t, Config{InactiveAfter: time.Minute})
	a, b := s.join("a", 1), s.join("b", 2)
	s.sendAll(a, "REGISTER t")
	s.sendAll(b, "REGISTER t")
	s.now = s.now.Add(40 * time.Second)
	s.sendAll(b, "PING")
	s.now = s.now.Add(20 * time.Second)
	s.check("t", "a,b ")
	s.now = s.now.Add(1)
	s.check("t", "b ")
	if nodes := s.r.Nodes(s.now); len(nodes) != 1 {
		t.Errorf("nodes %+v", nodes)
	}
	s.sendAll(a, "PING")
	s.check("t", "a,b ")
}

func TestTombstones(t *testing.T) {
	s := newScene(t, Config{TombstoneFor: time.Minute})
	a := s.join("a", 1)
	s.sendAll(a, "REGISTER t", "REGISTER u")
	hidden := func(topic string, want bool) {
		t.Helper()
		testkit.Equal(t, s.r.Tombstoned(s.now, topic, "a", 2), want, "%s hidden", topic)
	}
	hidden("t", false)
	if s.r.Tombstoned(-1, "t", "a", 2) {
		t.Error("hidden without a tombstone, before the clock's zero")
	}
	s.r.Tombstone(s.now, "t", "a", 2)
	hidden("t", true)
	hidden("u", false)
	s.sendAll(a, "PING", "REGISTER t")
	hidden("t", true)
	s.sendAll(a, "UNREGISTER t", "REGISTER t")
	hidden("t", false)

	s.r.Tombstone(s.now, "t", "a", 2)
	s.now = s.now.Add(time.Minute - 1)
	hidden("t", true)
	s.now++
	hidden("t", false)
	s.r.Tombstone(s.now, "u", "a", 2)
	if got := s.r.Stats().Tombstones; got != 1 {
		t.Errorf("%d tombstones are kept, want the one in force", got)
	}
}

func TestRegistryRefusesAboveItsBounds(t *testing.T) {
	s := newScene(t, Config{MaxNodes: 2, MaxRegistrations: 3, MaxNames: 5})
	a, b := s.join("a", 1), s.join("b", 2)
	_, err := s.r.Join(s.now, "192.0.2.1:3")
	testkit.ErrorIs(t, err, ErrFull, "a third node")
	s.sendAll(a, "REGISTER t c", "REGISTER u", "REGISTER u")
	if err := s.send(a, "REGISTER u c"); err == nil || err.Error() != "E_INVALID REGISTER more than 3 topics and channels" {
		t.Errorf("a fourth registration: %v", err)
	}
	s.sendAll(b, "REGISTER v c", "REGISTER v c")
	if err := s.send(b, "REGISTER w"); err == nil || err.Error() != "E_INVALID REGISTER too many topics and channels" {
		t.Errorf("a sixth name: %v", err)
	}
	testkit.ErrorIs(t, s.r.CreateChannel("t", "d"), ErrNames, "a sixth name")
	s.check("w", "unknown")
	s.r.Leave(b)
	s.join("c", 3)
	testkit.Equal(t, s.r.Stats(), (Stats{Connections: 2, Topics: 3, Names: 5}), "stats")
}

func TestConfigFaults(t *testing.T) {
	err := Config{InactiveAfter: -1, MaxNames: -1}.Validate()
	for _, part := range []string{"inactive producer timeout", "names -1"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%v does not say %q", err, part)
		}
	}
	testkit.NoError(t, (Config{}).Validate())
}

// At each step a registry answers as a list of registrations that is searched from end to end.
func TestAnyHistory(t *testing.T) {
	type entry struct {
		id ID
		k  key
	}
	rapid.Check(t, func(t *rapid.T) {
		r := New(Config{})
		var live []ID
		var entries []entry
		names := map[key]bool{}
		name := rapid.SampledFrom([]string{"a", "b", "e#ephemeral"})
		holders := func(k key) (ids []ID) {
			for _, e := range entries {
				if e.k == k {
					ids = append(ids, e.id)
				}
			}
			slices.Sort(ids)
			return slices.Compact(ids)
		}
		// settle forgets ephemeral entries that had a producer and have none now.
		settle := func(touched []key) {
			for _, k := range touched {
				if k.channel != "" && wire.Ephemeral(k.channel) && len(holders(k)) == 0 {
					delete(names, k)
				}
			}
			for _, k := range touched {
				if wire.Ephemeral(k.topic) && len(holders(key{topic: k.topic})) == 0 {
					for n := range names {
						if n.topic == k.topic {
							delete(names, n)
						}
					}
				}
			}
		}
		remove := func(remove func(entry) bool) {
			var touched []key
			for _, e := range entries {
				if remove(e) {
					touched = append(touched, e.k)
				}
			}
			entries = slices.DeleteFunc(entries, remove)
			settle(touched)
		}
		handle := func(id ID, c Command) {
			if _, err := r.Handle(1, id, c); err != nil {
				t.Fatalf("%+v: %v", c, err)
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			k := key{name.Draw(t, "topic"), rapid.SampledFrom([]string{"", "c", "d#ephemeral"}).Draw(t, "channel")}
			step := rapid.IntRange(0, 7).Draw(t, "step")
			if step > 0 && step < 4 && len(live) == 0 {
				step = 0
			}
			var id ID
			if step > 0 && step < 4 {
				id = rapid.SampledFrom(live).Draw(t, "node")
			}
			switch step {
			case 0:
				fresh := testkit.Result(r.Join(1, "x")).Must(t)
				handle(fresh, Command{Verb: Identify, Node: Node{BroadcastAddress: fmt.Sprint(fresh), TCPPort: 1, HTTPPort: 1, Version: "1"}})
				live = append(live, fresh)
			case 1:
				handle(id, Command{Verb: Register, Topic: k.topic, Channel: k.channel})
				for _, one := range []key{{topic: k.topic}, k} {
					if names[one] = true; !slices.Contains(entries, entry{id, one}) {
						entries = append(entries, entry{id, one})
					}
				}
			case 2:
				handle(id, Command{Verb: Unregister, Topic: k.topic, Channel: k.channel})
				remove(func(e entry) bool {
					return e.id == id && (e.k == k || k.channel == "" && e.k.topic == k.topic)
				})
			case 3:
				r.Leave(id)
				live = slices.DeleteFunc(live, func(other ID) bool { return other == id })
				remove(func(e entry) bool { return e.id == id })
			case 4:
				testkit.Must(t, r.CreateTopic(k.topic))
				names[key{topic: k.topic}] = true
			case 7:
				if k.channel == "" {
					continue
				}
				testkit.Must(t, r.CreateChannel(k.topic, k.channel))
				names[key{topic: k.topic}], names[k] = true, true
			case 5:
				r.DeleteTopic(k.topic)
				entries = slices.DeleteFunc(entries, func(e entry) bool { return e.k.topic == k.topic })
				for n := range names {
					if n.topic == k.topic {
						delete(names, n)
					}
				}
			case 6:
				if k.channel == "" {
					continue
				}
				err := r.DeleteChannel(k.topic, k.channel)
				testkit.MustEqual(t, names[k], (err == nil), "delete %v: %v, known", k, err)
				delete(names, k)
				entries = slices.DeleteFunc(entries, func(e entry) bool { return e.k == k })
			}
			r.check(t)
			for i, n := range r.Nodes(1) { // by connection, each with its topics
				if n.BroadcastAddress != fmt.Sprint(live[i]) || n.Remote != "x" || !slices.IsSorted(n.Topics) {
					t.Fatalf("node %d is %+v of %v", i, n, live)
				}
				for _, topic := range []string{"a", "b", "e#ephemeral"} {
					testkit.MustEqual(t, slices.Contains(holders(key{topic: topic}), live[i]), slices.Contains(n.Topics, topic), "node %+v has %s", n, topic)
				}
			}
			for _, topic := range []string{"a", "b", "e#ephemeral"} {
				if slices.Contains(r.Topics(), topic) != names[key{topic: topic}] {
					t.Fatalf("topics %q, want %s: %v", r.Topics(), topic, names[key{topic: topic}])
				}
				nodes, channels, found := r.Producers(1, topic)
				testkit.MustEqual(t, found, names[key{topic: topic}], "%s found", topic)
				var ids []ID
				for _, n := range nodes {
					var one ID
					fmt.Sscan(n.BroadcastAddress, &one)
					ids = append(ids, one)
				}
				if want := holders(key{topic: topic}); !slices.Equal(ids, want) {
					t.Fatalf("%s: nodes %v, want %v", topic, ids, want)
				}
				for _, channel := range []string{"c", "d#ephemeral"} {
					if slices.Contains(channels, channel) != names[key{topic, channel}] {
						t.Fatalf("%s: channels %q, want %s: %v", topic, channels, channel, names[key{topic, channel}])
					}
				}
			}
		}
	})
}
