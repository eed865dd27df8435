package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/store"
)

// silent is a store that elects a leader, but does not answer a resignation.
type silent struct {
	store.Memory
	resigned atomic.Int32 // number of resignations
}

type silentTerm struct {
	store.Term
	of *silent
}

func (s *silent) Lead(ctx context.Context, advertise string) (store.Term, *catalog.Catalog, error) {
	term, cat, err := s.Memory.Lead(ctx, advertise)
	return silentTerm{term, s}, cat, err
}

func (t silentTerm) Resign(ctx context.Context) error {
	<-ctx.Done()
	_ = t.Term.Resign(context.WithoutCancel(ctx))
	t.of.resigned.Add(1)
	return ctx.Err()
}

// A former leader serves as a follower immediately, without waiting until the lost store accepts the
// resignation.
func TestALostLeaderFollowsAtOnce(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		data := new(silent)
		var roles []string
		var logged bytes.Buffer
		err := alternate(ctx, &options{store: storeEtcd, etcdLease: time.Minute}, slog.New(slog.NewTextHandler(&logged, nil)), data, func(ctx context.Context, role role) error {
			resigned := int(data.resigned.Load())
			roles = append(roles, fmt.Sprintf("leads %v, %d resigned", role.term != nil, resigned))
			switch len(roles) {
			case 2:
				return controller.ErrNotCommitted
			case 4:
				stop()
				return nil
			}
			<-ctx.Done()
			return nil
		})
		if want := "[leads false, 0 resigned leads true, 0 resigned leads false, 0 resigned leads true, 1 resigned]"; fmt.Sprint(roles) != want {
			t.Errorf("%v, want %s", roles, want)
		}
		if err != nil || data.resigned.Load() != 2 {
			t.Errorf("%v, %d resigned at the end", err, data.resigned.Load())
		}
		if n := strings.Count(logged.String(), "cannot resign"); n != 1 { // at the end
			t.Errorf("the log says %d times that the loaddistributor cannot resign:\n%s", n, logged.String())
		}
	})
}
