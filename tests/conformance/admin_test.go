package conformance

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

func TestTopicRoutes(t *testing.T) {
	group(t)
	for _, verb := range []string{"create", "delete", "empty", "pause", "unpause"} {
		check(t, verb+" of an existing topic", func(t *testing.T) {
			n := common(t)
			topic := n.topic()
			n.does(t, "/topic/create?topic="+topic)
			r := n.post(t, "/topic/"+verb+"?topic="+topic, "")
			if r.status != http.StatusOK || r.body != "" {
				t.Errorf("got %d %q", r.status, r.body)
			}
			if _, exists := n.lookup(t, topic); exists != (verb != "delete") {
				t.Errorf("the topic exists: %t", exists)
			}
		})
		check(t, verb+" without a topic", func(t *testing.T) {
			common(t).post(t, "/topic/"+verb, "").refused(t, 400, "MISSING_ARG_TOPIC")
		})
		if verb != "create" {
			check(t, verb+" of an unknown topic", func(t *testing.T) {
				n := common(t)
				topic := n.topic()
				n.post(t, "/topic/"+verb+"?topic="+topic, "").refused(t, 404, "TOPIC_NOT_FOUND")
				if _, exists := n.lookup(t, topic); exists {
					t.Error("it was created")
				}
			})
		}
	}
}

func TestChannelRoutes(t *testing.T) {
	group(t)
	for _, verb := range []string{"create", "delete", "empty", "pause", "unpause"} {
		check(t, verb+" of an existing channel", func(t *testing.T) {
			n := common(t)
			topic := n.topic()
			n.does(t, "/topic/create?topic="+topic)
			n.does(t, "/channel/create?topic="+topic+"&channel=ch")
			r := n.post(t, "/channel/"+verb+"?topic="+topic+"&channel=ch", "")
			if r.status != http.StatusOK || r.body != "" {
				t.Errorf("got %d %q", r.status, r.body)
			}
			if _, exists := mustLookup(t, n, topic).channel("ch"); exists != (verb != "delete") {
				t.Errorf("the channel exists: %t", exists)
			}
		})
		for _, f := range []queryFault{
			{"", 400, "MISSING_ARG_TOPIC"},
			{"?channel=ch", 400, "MISSING_ARG_TOPIC"},
		} {
			check(t, verb+" "+f.query, func(t *testing.T) {
				common(t).post(t, "/channel/"+verb+f.query, "").refused(t, f.status, f.code)
			})
		}
		check(t, verb+" without a channel", func(t *testing.T) {
			n := common(t)
			topic := n.topic()
			n.does(t, "/topic/create?topic="+topic)
			n.post(t, "/channel/"+verb+"?topic="+topic, "").refused(t, 400, "MISSING_ARG_CHANNEL")
		})
		check(t, verb+" without a channel, of an unknown topic", func(t *testing.T) {
			n := common(t)
			n.post(t, "/channel/"+verb+"?topic="+n.topic(), "").refused(t, 400, "MISSING_ARG_CHANNEL")
		})
		check(t, verb+" of an unknown topic", func(t *testing.T) {
			n := common(t)
			topic := n.topic()
			n.post(t, "/channel/"+verb+"?channel=ch&topic="+topic, "").refused(t, 404, "TOPIC_NOT_FOUND")
			if _, exists := n.lookup(t, topic); exists {
				t.Error("it was created")
			}
		})
		if verb != "create" {
			check(t, verb+" of an unknown channel", func(t *testing.T) {
				n := common(t)
				topic := n.topic()
				n.does(t, "/topic/create?topic="+topic)
				n.post(t, "/channel/"+verb+"?channel=ch&topic="+topic, "").refused(t, 404, "CHANNEL_NOT_FOUND")
				if s := mustLookup(t, n, topic); len(s.Channels) != 0 {
					t.Errorf("it was created: %+v", s)
				}
			})
		}
	}
}

// Names that are there and not valid. Each family of routes has its own words.
func TestRouteNames(t *testing.T) {
	group(t)
	long := strings.Repeat("a", 65)
	for path, code := range map[string]string{
		"/pub":          "400 INVALID_TOPIC",
		"/mpub":         "400 INVALID_TOPIC",
		"/topic/create": "400 INVALID_TOPIC",
		"/topic/empty":  "400 INVALID_TOPIC",

		"/topic/delete":  "404 TOPIC_NOT_FOUND",
		"/topic/pause":   "404 TOPIC_NOT_FOUND",
		"/topic/unpause": "404 TOPIC_NOT_FOUND",

		"/channel/create":  "400 INVALID_ARG_TOPIC",
		"/channel/delete":  "400 INVALID_ARG_TOPIC",
		"/channel/empty":   "400 INVALID_ARG_TOPIC",
		"/channel/pause":   "400 INVALID_ARG_TOPIC",
		"/channel/unpause": "400 INVALID_ARG_TOPIC",
	} {
		status, message, _ := strings.Cut(code, " ")
		number, err := strconv.Atoi(status)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"", "a*", long} {
			check(t, fmt.Sprintf("topic %q", name[:min(2, len(name))])+" "+path, func(t *testing.T) {
				common(t).post(t, path+"?channel=ch&topic="+name, "x").refused(t, number, message)
			})
			if strings.HasPrefix(path, "/channel/") {
				check(t, fmt.Sprintf("channel %q", name[:min(2, len(name))])+" "+path, func(t *testing.T) {
					n := common(t)
					n.does(t, "/topic/create?topic=t")
					n.post(t, path+"?topic=t&channel="+name, "x").refused(t, 400, "INVALID_ARG_CHANNEL")
				})
			}
		}
	}
}

func TestRouteMethods(t *testing.T) {
	group(t)
	for path, right := range map[string]string{
		"/ping": http.MethodGet, "/info": http.MethodGet, "/stats": http.MethodGet,
		"/pub": http.MethodPost, "/mpub": http.MethodPost,
		"/topic/create": http.MethodPost, "/topic/delete": http.MethodPost, "/topic/empty": http.MethodPost,
		"/topic/pause": http.MethodPost, "/topic/unpause": http.MethodPost,
		"/channel/create": http.MethodPost, "/channel/delete": http.MethodPost, "/channel/empty": http.MethodPost,
		"/channel/pause": http.MethodPost, "/channel/unpause": http.MethodPost,
	} {
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete} {
			if method == right {
				continue
			}
			check(t, method+" "+path, func(t *testing.T) {
				common(t).web(t, method, path+"?topic=t&channel=ch", "x").refused(t, 405, "METHOD_NOT_ALLOWED")
			})
		}
	}
}

func TestPause(t *testing.T) {
	group(t)
	check(t, "channel", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c, other := n.consumer(t, topic, "ch").rdy(10), n.consumer(t, topic, "other").rdy(10)
		n.does(t, "/channel/pause?topic="+topic+"&channel=ch")
		n.publish(t, topic, "x")
		other.body("x")
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.Paused && s.Depth == 1 && s.InFlight == 0 })
		n.settle(t, topic, "other", func(s channelStats) bool { return !s.Paused })
		c.quiet()
		n.does(t, "/channel/unpause?topic="+topic+"&channel=ch")
		c.body("x")
		n.settle(t, topic, "ch", func(s channelStats) bool { return !s.Paused && s.InFlight == 1 })
	})
	check(t, "channel, with messages in flight", func(t *testing.T) {
		n := common(t)
		topic, c, m := held(t, n)
		n.does(t, "/channel/pause?topic="+topic+"&channel=ch")
		c.req(m.id, 0)
		n.depth(t, topic, "ch", 1)
		c.quiet()
		n.does(t, "/channel/unpause?topic="+topic+"&channel=ch")
		c.fin(c.body("x").id)
		n.depth(t, topic, "ch", 0)
	})
	check(t, "topic", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(10)
		n.does(t, "/topic/pause?topic="+topic)
		n.publish(t, topic, "x", "y")
		s := mustLookup(t, n, topic)
		if ch, _ := s.channel("ch"); !s.Paused || s.Depth != 2 || ch.Paused || ch.MessageCount != 0 {
			t.Errorf("got %+v", s)
		}
		c.quiet()
		n.does(t, "/topic/unpause?topic="+topic)
		c.bodies(2)
		if s := mustLookup(t, n, topic); s.Paused || s.Depth != 0 {
			t.Errorf("got %+v", s)
		}
	})
	check(t, "topic, a channel that comes later gets all", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		a := n.consumer(t, topic, "a").rdy(10)
		n.does(t, "/topic/pause?topic="+topic)
		n.publish(t, topic, "x")
		b := n.consumer(t, topic, "b").rdy(10)
		n.does(t, "/topic/unpause?topic="+topic)
		a.body("x")
		b.body("x")
	})
	check(t, "twice is once", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(10)
		for _, verb := range []string{"pause", "pause", "unpause", "unpause"} {
			n.does(t, "/channel/"+verb+"?topic="+topic+"&channel=ch")
			n.does(t, "/topic/"+verb+"?topic="+topic)
		}
		n.publish(t, topic, "x")
		c.body("x")
	})
}

func TestEmpty(t *testing.T) {
	group(t)
	check(t, "channel: what waits, what is deferred, what is in flight", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(1)
		other := n.consumer(t, topic, "other")
		n.publish(t, topic, "1", "2", "3")
		n.open(t).dpub(topic, maxDelay, "later")
		m := c.message()
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.Depth == 2 && s.InFlight == 1 && s.Deferred == 1 })
		n.does(t, "/channel/empty?topic="+topic+"&channel=ch")
		n.settle(t, topic, "ch", func(s channelStats) bool {
			return s.Depth == 0 && s.InFlight == 0 && s.Deferred == 0 && s.ClientCount == 1
		})
		c.fin(m.id)
		c.fault("E_FIN_FAILED")
		n.publish(t, topic, "new")
		c.body("new")
		n.depth(t, topic, "other", 4)
		other.rdy(10).bodies(4)
	})
	check(t, "topic: what waits there, not what channels have", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch")
		n.publish(t, topic, "kept")
		n.depth(t, topic, "ch", 1)
		n.does(t, "/topic/pause?topic="+topic)
		n.publish(t, topic, "gone", "gone")
		n.does(t, "/topic/empty?topic="+topic)
		if s := mustLookup(t, n, topic); s.Depth != 0 || s.MessageCount != 3 {
			t.Errorf("got %+v", s)
		}
		n.does(t, "/topic/unpause?topic="+topic)
		c.rdy(10).body("kept")
		c.quiet()
	})
}

func TestDelete(t *testing.T) {
	group(t)
	check(t, "channel: its consumers are closed, the topic stays", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c, other := n.consumer(t, topic, "ch").rdy(1), n.consumer(t, topic, "other").rdy(1)
		n.does(t, "/channel/delete?topic="+topic+"&channel=ch")
		c.closed()
		if s := mustLookup(t, n, topic); len(s.Channels) != 1 {
			t.Errorf("got %+v", s)
		}
		n.publish(t, topic, "x")
		other.body("x")
	})
	check(t, "topic: consumers are closed, publishers are not", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(1)
		p := n.open(t)
		p.pub(topic, "old")
		c.body("old")
		n.does(t, "/topic/delete?topic="+topic)
		c.closed()
		if _, exists := n.lookup(t, topic); exists {
			t.Error("the topic exists")
		}
		p.pub(topic, "new")
		if s := mustLookup(t, n, topic); s.MessageCount != 1 || len(s.Channels) != 0 {
			t.Errorf("a new topic begins with %+v", s)
		}
	})
	check(t, "messages go with the channel", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		n.consumer(t, topic, "ch")
		n.publish(t, topic, "old")
		n.depth(t, topic, "ch", 1)
		n.does(t, "/channel/delete?topic="+topic+"&channel=ch")
		n.consumer(t, topic, "ch").rdy(1).quiet()
	})
	check(t, "an ephemeral topic goes with its last channel", func(t *testing.T) {
		n := common(t)
		topic := n.topic() + "#ephemeral"
		n.consumer(t, topic, "ch")
		n.does(t, "/channel/delete?channel=ch&topic="+strings.ReplaceAll(topic, "#", "%23"))
		eventually(t, func() string {
			if s, exists := n.lookup(t, topic); exists {
				return fmt.Sprintf("the topic exists: %+v", s)
			}
			return ""
		})
	})
}
