package agent

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/tokenbucket"
)

func share(rate tokenbucket.Rate, burst int64) tokenbucket.Share {
	return tokenbucket.Share{Rate: rate, Burst: burst}
}

func TestOfferByEpoch(t *testing.T) {
	h := newHoldings()
	if _, due := h.prepared("t"); due {
		t.Fatal("a share is due that nobody granted")
	}
	for _, test := range []struct {
		epoch uint64
		want  verdict
	}{{5, inForce}, {5, stale}, {4, stale}, {6, inForce}, {1, stale}} {
		g := grant{topic: "t", epoch: test.epoch, share: share(10, 1)}
		v, _ := h.offer(g)
		if v != test.want {
			t.Errorf("epoch %d with %d in force: %v, want %v", test.epoch, h.topics["t"].epoch, verdictNames[v], verdictNames[test.want])
		}
		if v == inForce {
			h.applied(g)
		}
	}
	if got := h.topics["t"].epoch; got != 6 {
		t.Errorf("epoch %d is in force, want 6", got)
	}
}

func TestAGrantBeforeItsTopic(t *testing.T) {
	h := newHoldings()
	if v, _ := h.offer(grant{topic: "t", epoch: 1, share: share(10, 3), tokens: 3000}); v != kept {
		t.Fatalf("first grant: %v", verdictNames[v])
	}
	if v, released := h.offer(grant{topic: "t", epoch: 2, share: share(20, 2), tokens: 0}); v != kept || released != 1000 {
		t.Errorf("a smaller burst: %v, released %d, want kept and 1000", verdictNames[v], released)
	}
	if v, _ := h.offer(grant{topic: "t", epoch: 1, share: share(10, 3), tokens: 3000}); v != stale {
		t.Errorf("an old grant again: %v", verdictNames[v])
	}
	if v, released := h.offer(grant{topic: "t", epoch: 3, share: share(20, 4), tokens: 2000}); v != kept || released != 0 {
		t.Errorf("a greater burst: %v, released %d", verdictNames[v], released)
	}
	if held := h.reconcile(nil); len(held) != 1 || held[0].Epoch != 3 {
		t.Errorf("the hello says %v, want the share that lies here", held)
	}
	g, due := h.prepared("t")
	if want := (grant{topic: "t", epoch: 3, share: share(20, 4), tokens: 4000}); !due || g != want {
		t.Errorf("due at the preparation: %v %+v, want %+v", due, g, want)
	}
	if _, due := h.prepared("t"); due {
		t.Error("it is due a second time")
	}
	if v, _ := h.offer(grant{topic: "t", epoch: 4, share: share(1, 1), tokens: 0}); v != inForce {
		t.Errorf("after the preparation: %v", verdictNames[v])
	}
}

func TestNothingOfATopicThatIsNotThere(t *testing.T) {
	h := newHoldings()
	if v, released := h.offer(grant{topic: "t", epoch: 7, share: tokenbucket.Share{}, tokens: 0}); v != kept || released != 0 || len(h.topics) != 0 {
		t.Errorf("an empty share: %v, released %d, %d topics", verdictNames[v], released, len(h.topics))
	}
	h.offer(grant{topic: "t", epoch: 8, share: share(10, 3), tokens: 3000})
	if v, released := h.offer(grant{topic: "t", epoch: 9, share: tokenbucket.Share{}, tokens: 0}); v != kept || released != 3000 || len(h.topics) != 0 || h.kept != 0 {
		t.Errorf("withdrawn: %v, released %d, %d topics, %d kept", verdictNames[v], released, len(h.topics), h.kept)
	}
}

func TestKeptSharesAreBounded(t *testing.T) {
	h := newHoldings()
	for i := range maxKept {
		if v, _ := h.offer(grant{topic: fmt.Sprint("t", i), epoch: 1, share: share(1, 1)}); v != kept {
			t.Fatalf("grant %d: %v", i, verdictNames[v])
		}
	}
	if v, _ := h.offer(grant{topic: "one more", epoch: 1, share: share(1, 1), tokens: 0}); v != dropped {
		t.Errorf("one more: %v", verdictNames[v])
	}
	if v, _ := h.offer(grant{topic: "t7", epoch: 2, share: share(2, 1), tokens: 0}); v != kept {
		t.Errorf("another one of a topic that is kept: %v", verdictNames[v])
	}
	h.removed("t0")
	if v, _ := h.offer(grant{topic: "one more", epoch: 1, share: share(1, 1), tokens: 0}); v != kept {
		t.Errorf("when there is room again: %v", verdictNames[v])
	}
}

func TestReconcileForgetsWhatIsGone(t *testing.T) {
	h := newHoldings()
	for _, name := range []string{"b", "a", "gone"} {
		h.prepared(name)
		h.applied(grant{topic: name, epoch: 3, share: share(1, 1), tokens: 0})
	}
	h.prepared("no share yet")
	held := h.reconcile([]string{"a", "b", "no share yet", "of others"})
	if len(held) != 2 || held[0].Topic != "a" || held[1].Topic != "b" {
		t.Errorf("held %v, want a and b", held)
	}
	if v, _ := h.offer(grant{topic: "gone", epoch: 4, share: share(1, 1), tokens: 0}); v != kept {
		t.Errorf("a grant of a topic that is gone: %v", verdictNames[v])
	}
}

func TestCheckGrant(t *testing.T) {
	good := func() *srtmv1.Grant {
		return &srtmv1.Grant{Topic: "t", Epoch: 1, Share: &srtmv1.Share{RateMilli: 10, Burst: 2}, TokensMilli: 2000}
	}
	if g, err := checkGrant(good()); err != nil || g != (grant{topic: "t", epoch: 1, share: share(10, 2), tokens: 2000}) {
		t.Errorf("a good grant: %+v, %v", g, err)
	}
	if g, err := checkGrant(&srtmv1.Grant{Topic: "t", Epoch: 1}); err != nil || !g.share.IsZero() {
		t.Errorf("an empty share: %+v, %v", g, err)
	}
	for name, spoil := range map[string]func(*srtmv1.Grant){
		"no topic":         func(g *srtmv1.Grant) { g.Topic = "" },
		"no epoch":         func(g *srtmv1.Grant) { g.Epoch = 0 },
		"negative rate":    func(g *srtmv1.Grant) { g.Share.RateMilli = -1 },
		"no burst":         func(g *srtmv1.Grant) { g.Share.Burst = 0 },
		"huge burst":       func(g *srtmv1.Grant) { g.Share.Burst = 1 << 62 },
		"negative tokens":  func(g *srtmv1.Grant) { g.TokensMilli = -1 },
		"too many tokens":  func(g *srtmv1.Grant) { g.TokensMilli = 2001 },
		"tokens, no share": func(g *srtmv1.Grant) { g.Share = nil; g.TokensMilli = 1 },
	} {
		g := good()
		spoil(g)
		if got, err := checkGrant(g); err == nil {
			t.Errorf("%s: accepted as %+v", name, got)
		}
	}
}

// Whatever comes in whatever order: the epoch of a topic only grows while it is
// known, tokens are neither made nor lost before the node has them, a kept
// bucket never holds more than its burst, and kept counts what it says.
func TestAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := newHoldings()
		given := map[string]tokenbucket.Tokens{} // with the agent, not yet with the node
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			topic := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "topic")
			before, known := h.topics[topic]
			switch rapid.IntRange(0, 4).Draw(t, "kind") {
			case 0, 1:
				g := grant{topic: topic, epoch: rapid.Uint64Range(1, 20).Draw(t, "epoch")}
				if burst := rapid.Int64Range(0, 5).Draw(t, "burst"); burst > 0 {
					g.share = share(10, burst)
					g.tokens = tokenbucket.Tokens(rapid.Int64Range(0, burst*1000).Draw(t, "tokens"))
				}
				switch v, released := h.offer(g); v {
				case stale:
					if !known || g.epoch > before.epoch {
						t.Fatalf("%+v is stale after %+v", g, before)
					}
				case inForce:
					if !before.prepared || g.epoch <= before.epoch {
						t.Fatalf("%+v in force after %+v", g, before)
					}
					h.applied(g)
				case kept:
					given[topic] += g.tokens - released
				}
			case 2:
				if g, due := h.prepared(topic); due {
					if g.tokens != given[topic] {
						t.Fatalf("%d tokens due, %d were given", g.tokens, given[topic])
					}
					delete(given, topic)
				}
			case 3:
				h.removed(topic)
				delete(given, topic)
			case 4:
				if before.prepared {
					g := grant{topic: topic, epoch: before.epoch + 1, share: share(10, 2), tokens: 1500}
					given[topic] += g.tokens - h.vanished(g)
				}
			}
			n := 0
			for name, in := range h.topics {
				if !in.prepared {
					n++
					if in.tokens > tokenbucket.Tokens(in.share.Burst)*tokenbucket.Token || in.share.IsZero() {
						t.Fatalf("%s keeps %+v", name, in)
					}
					if in.tokens != given[name] {
						t.Fatalf("%s keeps %d tokens, was given %d", name, in.tokens, given[name])
					}
				}
			}
			if n != h.kept {
				t.Fatalf("%d kept, counted %d", n, h.kept)
			}
			if after, still := h.topics[topic]; known && still && after.epoch < before.epoch {
				t.Fatalf("epoch of %s fell from %d to %d", topic, before.epoch, after.epoch)
			}
		}
	})
}
