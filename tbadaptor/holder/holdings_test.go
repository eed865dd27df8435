package holder

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func share(rate tokenbucket.Rate, burst int64) tokenbucket.Share {
	return tokenbucket.Share{Rate: rate, Burst: burst}
}

func TestDueKnowsTheEndsOfShares(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := New()
		for epoch := range rapid.Uint64Range(1, 40).Draw(t, "steps") {
			topic := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "topic")
			switch rapid.IntRange(0, 7).Draw(t, "kind") {
			case 0, 1, 2:
				g := Grant{Topic: topic, Epoch: epoch + 1}
				if burst := rapid.Int64Range(0, 3).Draw(t, "burst"); burst > 0 {
					g.Share = share(10, burst)
					g.Flex = share(tokenbucket.Rate(rapid.IntRange(0, 5).Draw(t, "flexible")), 0)
				}
				if v, _ := h.Offer(g); v == InForce {
					h.Applied(g)
				}
			case 3:
				h.Prepared(topic)
			case 4:
				h.Removed(topic)
			case 5:
				h.GivenUp(topic)
			case 6:
				h.Lapse(true, rapid.Bool().Draw(t, "all"))
			case 7:
				h.Reconcile([]string{"a"})
			}
			hasGrant := mono.Never
			for _, holding := range h.topics {
				if holding.Flex != (tokenbucket.Share{}) {
					hasGrant = min(hasGrant, 3)
				}
				if !holding.Share.IsZero() {
					hasGrant = min(hasGrant, 5)
				}
			}
			if got := h.NextEnd(3, 5); got != hasGrant {
				t.Fatalf("due at %v, want %v: %+v", got, hasGrant, h.topics)
			}
		}
	})
}

func TestOfferByEpoch(t *testing.T) {
	h := New()
	if _, hasGrant := h.Prepared("t"); hasGrant {
		t.Fatal("a share is due that was not granted")
	}
	for _, test := range []struct {
		epoch uint64
		want  Verdict
	}{{5, InForce}, {5, Stale}, {4, Stale}, {6, InForce}, {1, Stale}} {
		g := Grant{Topic: "t", Epoch: test.epoch, Share: share(10, 1)}
		v, _ := h.Offer(g)
		testkit.Equal(t, v, test.want, "epoch %d with %d in force", test.epoch, h.topics["t"].Epoch)
		if v == InForce {
			h.Applied(g)
		}
	}
	testkit.Equal(t, h.topics["t"].Epoch, 6, "epoch is in force")
}

func TestAGrantBeforeItsTopic(t *testing.T) {
	h := New()
	if v, _ := h.Offer(Grant{Topic: "t", Epoch: 1, Share: share(10, 3), Tokens: 3000}); v != Kept {
		t.Fatalf("first grant: %v", v)
	}
	if v, released := h.Offer(Grant{Topic: "t", Epoch: 2, Share: share(20, 2), Tokens: 0}); v != Kept || released != 1000 {
		t.Errorf("a smaller burst: %v, released %d, want kept and 1000", v, released)
	}
	if v, _ := h.Offer(Grant{Topic: "t", Epoch: 1, Share: share(10, 3), Tokens: 3000}); v != Stale {
		t.Errorf("an old grant again: %v", v)
	}
	if v, released := h.Offer(Grant{Topic: "t", Epoch: 3, Share: share(20, 4), Tokens: 2000}); v != Kept || released != 0 {
		t.Errorf("a greater burst: %v, released %d", v, released)
	}
	if held := h.Reconcile(nil); len(held) != 1 || held[0].Epoch != 3 {
		t.Errorf("the hello has %v, want the share that lies here", held)
	}
	g, hasGrant := h.Prepared("t")
	if want := (Grant{Topic: "t", Epoch: 3, Share: share(20, 4), Tokens: 4000}); !hasGrant || g != want {
		t.Errorf("due at the preparation: %v %+v, want %+v", hasGrant, g, want)
	}
	if _, hasGrant := h.Prepared("t"); hasGrant {
		t.Error("it is due a second time")
	}
	if v, _ := h.Offer(Grant{Topic: "t", Epoch: 4, Share: share(1, 1), Tokens: 0}); v != InForce {
		t.Errorf("after the preparation: %v", v)
	}
}

func TestNothingOfATopicThatIsNotThere(t *testing.T) {
	h := New()
	if v, released := h.Offer(Grant{Topic: "t", Epoch: 7, Share: tokenbucket.Share{}, Tokens: 0}); v != Kept || released != 0 || len(h.topics) != 0 {
		t.Errorf("an empty share: %v, released %d, %d topics", v, released, len(h.topics))
	}
	h.Offer(Grant{Topic: "t", Epoch: 8, Share: share(10, 3), Tokens: 3000})
	if v, released := h.Offer(Grant{Topic: "t", Epoch: 9, Share: tokenbucket.Share{}, Tokens: 0}); v != Kept || released != 3000 || len(h.topics) != 0 || h.kept != 0 {
		t.Errorf("withdrawn: %v, released %d, %d topics, %d kept", v, released, len(h.topics), h.kept)
	}
}

func TestKeptSharesAreBounded(t *testing.T) {
	h := New()
	for i := range maxKept {
		if v, _ := h.Offer(Grant{Topic: fmt.Sprint("t", i), Epoch: 1, Share: share(1, 1)}); v != Kept {
			t.Fatalf("grant %d: %v", i, v)
		}
	}
	if v, _ := h.Offer(Grant{Topic: "one more", Epoch: 1, Share: share(1, 1), Tokens: 0}); v != Dropped {
		t.Errorf("one more: %v", v)
	}
	if v, _ := h.Offer(Grant{Topic: "t7", Epoch: 2, Share: share(2, 1), Tokens: 0}); v != Kept {
		t.Errorf("another one of a topic that is kept: %v", v)
	}
	h.Removed("t0")
	if v, _ := h.Offer(Grant{Topic: "one more", Epoch: 1, Share: share(1, 1), Tokens: 0}); v != Kept {
		t.Errorf("when there is room again: %v", v)
	}
}

func TestReconcileForgetsWhatIsGone(t *testing.T) {
	h := New()
	for _, name := range []string{"b", "a", "gone"} {
		h.Prepared(name)
		h.Applied(Grant{Topic: name, Epoch: 3, Share: share(1, 1), Tokens: 0})
	}
	h.Prepared("no share yet")
	held := h.Reconcile([]string{"a", "b", "no share yet", "of others"})
	if len(held) != 2 || held[0].Topic != "a" || held[1].Topic != "b" {
		t.Errorf("held %v, want a and b", held)
	}
	if v, _ := h.Offer(Grant{Topic: "gone", Epoch: 4, Share: share(1, 1), Tokens: 0}); v != Kept {
		t.Errorf("a grant of a topic that is gone: %v", v)
	}
}

func TestCheck(t *testing.T) {
	valid := Grant{Topic: "t", Epoch: 1, Share: share(10, 2), Flex: share(3, 1), Tokens: 2000}
	for _, g := range []Grant{valid, {Topic: "t", Epoch: 1}} {
		if err := Check(g); err != nil {
			t.Errorf("%+v: %v", g, err)
		}
	}
	for name, spoil := range map[string]func(*Grant){
		"no topic":         func(g *Grant) { g.Topic = "" },
		"no epoch":         func(g *Grant) { g.Epoch = 0 },
		"negative rate":    func(g *Grant) { g.Share.Rate = -1 },
		"no burst":         func(g *Grant) { g.Share.Burst = 0 },
		"huge burst":       func(g *Grant) { g.Share.Burst = 1 << 62 },
		"negative part":    func(g *Grant) { g.Flex.Rate = -1 },
		"half a base":      func(g *Grant) { g.Flex.Burst = 2 },
		"negative tokens":  func(g *Grant) { g.Tokens = -1 },
		"too many tokens":  func(g *Grant) { g.Tokens = 2001 },
		"tokens, no share": func(g *Grant) { g.Share, g.Flex, g.Tokens = share(0, 0), share(0, 0), 1 },
	} {
		g := valid
		spoil(&g)
		if Check(g) == nil {
			t.Errorf("%s: accepted as %+v", name, g)
		}
	}
}

// For any calls in any order: a topic's epoch only grows while the topic is known, tokens are neither
// made nor lost before the node has them, a kept bucket never holds more than its burst, and kept
// counts what its comment states.
func TestAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := New()
		given := map[string]tokenbucket.Tokens{} // with the agent, not yet with the node
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			topic := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "topic")
			before, found := h.topics[topic]
			switch rapid.IntRange(0, 5).Draw(t, "kind") {
			case 0, 1:
				g := Grant{Topic: topic, Epoch: rapid.Uint64Range(1, 20).Draw(t, "epoch")}
				if burst := rapid.Int64Range(0, 5).Draw(t, "burst"); burst > 0 {
					g.Share = share(10, burst)
					g.Tokens = tokenbucket.Tokens(rapid.Int64Range(0, burst*1000).Draw(t, "tokens"))
				}
				switch v, released := h.Offer(g); v {
				case Stale:
					if !found || g.Epoch > before.Epoch {
						t.Fatalf("%+v is Stale after %+v", g, before)
					}
				case InForce:
					if !before.Prepared || g.Epoch <= before.Epoch {
						t.Fatalf("%+v in force after %+v", g, before)
					}
					h.Applied(g)
				case Kept:
					if before.Prepared {
						t.Fatalf("%+v is kept though the node has the topic", g)
					}
					given[topic] += g.Tokens - released
				}
			case 2:
				if g, hasGrant := h.Prepared(topic); hasGrant {
					if g.Tokens != given[topic] {
						t.Fatalf("%d tokens due, %d were given", g.Tokens, given[topic])
					}
					delete(given, topic)
				}
			case 3:
				h.Removed(topic)
				delete(given, topic)
			case 5:
				h.GivenUp(topic)
				if delete(given, topic); h.topics[topic].Prepared != before.Prepared || !h.topics[topic].Share.IsZero() {
					t.Fatalf("given up: %+v, before %+v", h.topics[topic], before)
				}
				before.Epoch = 0 // the next hello does not mention the topic
			case 4:
				if before.Prepared {
					g := Grant{Topic: topic, Epoch: before.Epoch + 1, Share: share(10, 2), Tokens: 1500}
					given[topic] += g.Tokens - h.Vanished(g)
				}
			}
			n := 0
			for name, holding := range h.topics {
				if !holding.Prepared {
					n++
					if holding.tokens > tokenbucket.Tokens(holding.Share.Burst)*tokenbucket.Token || holding.Share.IsZero() {
						t.Fatalf("%s keeps %+v", name, holding)
					}
					if holding.tokens != given[name] {
						t.Fatalf("%s keeps %d tokens, was given %d", name, holding.tokens, given[name])
					}
				}
			}
			if n != h.kept {
				t.Fatalf("%d kept, counted %d", n, h.kept)
			}
			if after, present := h.topics[topic]; found && present && after.Epoch < before.Epoch {
				t.Fatalf("epoch of %s fell from %d to %d", topic, before.Epoch, after.Epoch)
			}
		}
	})
}
