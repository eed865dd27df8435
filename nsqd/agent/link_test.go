package agent

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/srtm-io/srtm/internal/testkit"
)

// If a side does not read, the link first drops reports, and ends the session when there is no room for a reply.
func TestALinkThatNobodyReads(t *testing.T) {
	ctx, cut := context.WithCancelCause(t.Context())
	l := &link[int]{out: make(chan queued[int], linkQueue), cut: cut}
	sent := 0
	for l.report(new(int)) {
		sent++
	}
	if sent != reportsQueue {
		t.Errorf("%d reports were queued, want %d", sent, reportsQueue)
	}
	for range linkQueue - reportsQueue {
		l.reply(new(int))
	}
	if ctx.Err() != nil {
		t.Fatal("cut although there was room")
	}
	l.reply(new(int))
	testkit.ErrorIs(t, context.Cause(ctx), errSlow, "not cut")
}

func TestWhichAddressIsNext(t *testing.T) {
	three := []string{"a:1", "b:1", "c:1"}
	follower := func(leader string) error {
		s, err := status.New(codes.Unavailable, "no").WithDetails(&errdetails.ErrorInfo{
			Reason: "NOT_LEADER", Metadata: map[string]string{"leader": leader},
		})
		testkit.Must(t, err)
		return fmt.Errorf("open session: %w", s.Err())
	}
	for name, c := range map[string]struct {
		at               int
		err              error
		next             int
		named, elsewhere bool
	}{
		"it broke":                            {0, errors.New("broken"), 1, false, false},
		"the last one broke":                  {2, errUnreachable, 0, false, false},
		"a follower names the leader":         {0, follower("c:1"), 2, true, true},
		"a follower names itself":             {1, follower("b:1"), 2, false, true},
		"a follower names an unknown process": {1, follower("z:1"), 2, false, true},
		"a follower knows of no leader":       {2, follower(""), 0, false, true},
	} {
		if i, named, elsewhere := next(three, c.at, c.err); i != c.next || named != c.named || elsewhere != c.elsewhere {
			t.Errorf("%s: %d, %v, %v, want %d, %v, %v", name, i, named, elsewhere, c.next, c.named, c.elsewhere)
		}
	}
	if i, _, _ := next([]string{"a:1"}, 0, follower("b:1")); i != 0 {
		t.Errorf("the only one is not next, but %d", i)
	}
}
