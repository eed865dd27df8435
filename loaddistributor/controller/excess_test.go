package controller

import (
	"reflect"
	"testing"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestExcessNamesTheBrokersThatMayUseMore(t *testing.T) {
	share := func(perSecond tokenbucket.Rate) tokenbucket.Share {
		return tokenbucket.Share{Rate: perSecond * 1000, Burst: int64(perSecond)}
	}
	member := func(id string, reserved, target tokenbucket.Rate) *srtmv1.MemberShare {
		return &srtmv1.MemberShare{BrokerId: id, Reserved: service.ShareProto(share(reserved)), Target: service.ShareProto(share(target))}
	}
	type record = map[string]tokenbucket.Rate
	for name, c := range map[string]struct {
		contract, former tokenbucket.Rate
		raised           bool
		recorded         record
		awaited          []string
		members          []*srtmv1.MemberShare
		want             record
	}{
		"all have confirmed":                  {contract: 60, former: 90, members: []*srtmv1.MemberShare{member("x", 30, 30), member("y", 30, 30)}, want: record{}},
		"one has not":                         {contract: 60, former: 90, members: []*srtmv1.MemberShare{member("x", 45, 30), member("y", 30, 30)}, want: record{"x": 45}},
		"one is not known":                    {contract: 60, former: 90, awaited: []string{"x"}, members: []*srtmv1.MemberShare{member("y", 30, 30)}, want: record{"x": 90}},
		"one is recorded":                     {contract: 60, former: 90, recorded: record{"x": 45}, awaited: []string{"x"}, want: record{"x": 45}},
		"one is recorded from before a raise": {contract: 60, former: 90, raised: true, recorded: record{"x": 45}, awaited: []string{"x"}, want: record{"x": 90}},
		"of a raise none may use more":        {contract: 90, former: 60, raised: true, awaited: []string{"x"}, members: []*srtmv1.MemberShare{member("y", 30, 45)}, want: record{}},
		"the share of another is not known":   {contract: 60, recorded: record{"x": 36}, awaited: []string{"y"}, members: []*srtmv1.MemberShare{member("x", 36, 20), member("z", 20, 20)}, want: record{"x": 36}},
	} {
		query := reconcile.LookUnconfirmed{Contract: share(c.contract), Raised: c.raised}
		if c.former > 0 {
			query.Former, query.Holders = share(c.former), []string{"x", "y", "z"}
		}
		var recorded []catalog.UnconfirmedShare
		for id, rate := range c.recorded {
			recorded = append(recorded, catalog.UnconfirmedShare{Broker: id, Share: share(rate)})
		}
		shares := &srtmv1.TopicShares{Contract: &srtmv1.Contract{RateMilli: int64(query.Contract.Rate), Burst: query.Contract.Burst}, Awaited: c.awaited, Members: c.members}
		got := record{}
		for _, s := range excess(shares, query, recorded).Shares {
			got[s.Broker] = s.Share.Rate / 1000
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
