package ledger_test

import (
	"testing"

	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestTheFirstSharesComeFull(t *testing.T) {
	l := ledger.New(100)
	if _, err := l.Hello("a", "a1", nil); err != nil {
		t.Fatal(err)
	}
	grants, err := l.SetContract("t", tokenbucket.Share{Rate: 3000, Burst: 9}, []share.Assigned{
		{Broker: "a", Share: tokenbucket.Share{Rate: 2000, Burst: 6}},
		{Broker: "b", Share: tokenbucket.Share{Rate: 1000, Burst: 3}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(grants) != 1 || grants[0].Tokens != 6000 || grants[0].Epoch != 101 {
		t.Fatalf("grants %+v", grants)
	}
	grants, err = l.Hello("b", "b1", nil)
	if err != nil || len(grants) != 1 || grants[0].Tokens != 3000 || grants[0].Broker != "b" {
		t.Fatalf("grants %+v, error %v", grants, err)
	}
}
