package ledger_test

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// However a share has come about, its broker goes on with all but twice the flexible
// part when the lease is over.
func TestABaseKeepsUpWithItsShare(t *testing.T) {
	const flex = 50
	contract := tokenbucket.Share{Rate: 10_000_000, Burst: 1000}
	l := ledger.New(0, ledger.Leases{Flex: 3 * time.Second, Session: 30 * time.Second})
	if _, err := l.Hello(ledger.Session{Broker: "a", Instance: "1", Policy: ledger.Available}, 0); err != nil {
		t.Fatal(err)
	}
	part := func(n int64) []share.Assigned {
		return []share.Assigned{{Broker: "a", Share: tokenbucket.Share{Rate: contract.Rate * tokenbucket.Rate(n) / 100, Burst: contract.Burst * n / 100}}}
	}
	grants, err := l.SetContract("t", ledger.Terms{Contract: contract, Flex: flex}, part(50))
	for _, n := range []int64{54, 59, 62, 66, 60, 71, 85, 80, 99} {
		for _, g := range grants {
			base := g.Base()
			if int64(base.Rate) < int64(g.Share.Rate)*(1000-2*flex)/1000 || base.Burst < g.Share.Burst*(1000-2*flex)/1000 {
				t.Errorf("of %+v only %+v is base", g.Share, base)
			}
			if _, ackErr := l.Ack("a", "t", g.Epoch, g.Share, 0); ackErr != nil {
				t.Fatal(ackErr)
			}
		}
		if err != nil || len(grants) != 1 {
			t.Fatalf("%d %%: %v, %v", n, grants, err)
		}
		grants, err = l.Propose("t", part(n))
	}
}
