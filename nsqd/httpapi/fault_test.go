package httpapi

import (
	"fmt"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// A topic may be deleted between its look-up and an operation on the topic. The answer must not say that the broker is
// closing.
func TestADeletedTopicIsNotFound(t *testing.T) {
	for err, want := range map[error]string{
		broker.ErrGone:     "404 TOPIC_NOT_FOUND",
		broker.ErrDraining: "503 EXITING",
	} {
		f := asFault(fmt.Errorf("topic t: %w", err))
		testkit.Equal(t, fmt.Sprint(f.Status, " ", f.Message), want, "%v", err)
	}
}
