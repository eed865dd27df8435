package topics_test

import (
	"fmt"
	"testing"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/topics"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"k:3:1.5":            "k 3 1.5 0 0",
		":3:1":               " 3 1 0 0",
		"k:3:1:10":           "k 3 1 10 0",
		"k:3:1:10:255":       "k 3 1 10 255",
		"k:3":                "want KEY:COUNT:RATE[:BATCH[:WEIGHT]]",
		"k:3:1:1:1:1":        "want KEY:COUNT:RATE[:BATCH[:WEIGHT]]",
		"k:x:1":              `count "x" is not a number of publishers`,
		"k:3:x":              `rate "x" is not a number of messages per second`,
		"k:3:1:x":            `batch "x" is not a number of messages`,
		"k:3:1:9999999999":   `batch "9999999999" is not a number of messages`,
		"k:3:1:1:256":        `weight "256" is not a number in [1, 255]`,
		"k:9999999999:1:1:1": `count "9999999999" is not a number of publishers`,
	} {
		g, err := topics.ParseGroup(text)
		got := fmt.Sprint(err)
		if err == nil {
			got = fmt.Sprint(g.Key, " ", g.Count, " ", g.Rate, " ", g.Batch, " ", g.Weight)
		}
		testkit.Equal(t, got, want, "group %q", text)
	}
	for text, want := range map[string]string{
		"p:k:1.5":    "p k 1.5 0",
		"p::1:10":    "p  1 10",
		"p:k":        "want ID:KEY:RATE[:BATCH]",
		"p:k:1:10:1": "want ID:KEY:RATE[:BATCH]",
		"p:k:x":      `rate "x" is not a number of messages per second`,
	} {
		p, err := topics.ParsePublisher(text)
		got := fmt.Sprint(err)
		if err == nil {
			got = fmt.Sprint(p.Id, " ", p.CorrelationKey, " ", p.Rate, " ", p.Batch)
		}
		testkit.Equal(t, got, want, "publisher %q", text)
	}
}

func TestText(t *testing.T) {
	testkit.Equal(t, topics.MoveReason(srtmv1.MoveReason_MOVE_REASON_CONTRACT_CHANGE), "contract change")
	testkit.Equal(t, topics.State(srtmv1.TopicState_TOPIC_STATE_ACTIVE), "active")
}
