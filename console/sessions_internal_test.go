package console

import (
	"fmt"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// A user who logs in again and again ends only the user's own sessions.
func TestSessionsOfOneTokenMakeRoomForEachOther(t *testing.T) {
	var s sessions
	now := time.Now()
	s.open("mine", "admin", now)
	for i := range 2 * maxSessions {
		now = now.Add(time.Millisecond)
		s.open(fmt.Sprint("its", i), "reader", now)
	}
	testkit.Equal(t, s.token("mine", now), "admin", "the session of another was ended")
	if last := fmt.Sprint("its", 2*maxSessions-1); s.token(last, now) != "reader" || len(s.byCookie) != maxSessions {
		t.Errorf("%d sessions, and the last is not one of them", len(s.byCookie))
	}
}
