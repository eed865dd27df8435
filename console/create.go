package console

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/console/why"
	"github.com/srtm-io/srtm/internal/topics"
)

type createData struct {
	Form       url.Values
	Faults     []string
	Plan       *srtmv1.Topic // the planned placement
	Penalty    *why.Penalty  // the cost of the plan
	Infeasible *srtmv1.Infeasible
}

// formDefaults are the defaults of the form.
var formDefaults = url.Values{
	"rate": {"1000"}, "burst": {"100"}, "quantile": {fmt.Sprint(topics.DefaultQuantile)}, "latency": {topics.DefaultLatency.String()}, "policy": {"srtm"}, "rule": {"sqrt"}, "over": {"delay"}, "channels": {"main"},
}

// createPage shows the form, filled from the query.
func (c *Console) createPage(_ context.Context, q url.Values, u user) (view, error) {
	if !u.Admin {
		return view{}, &problem{http.StatusForbidden, "Creating topics takes the role admin."}
	}
	for key, value := range formDefaults {
		if !q.Has(key) {
			q[key] = value
		}
	}
	return createView(createData{Form: q}), nil
}

func createView(d createData) view {
	return view{Template: "create", Title: "Create topic", Crumbs: []link{{"Topics", "/ui/topics"}}, Data: d}
}

// create plans or creates the topic of the form.
func (c *Console) create(w http.ResponseWriter, r *http.Request) {
	d := createData{Form: r.PostForm}
	spec, faults := specOf(r.PostForm)
	if d.Faults = faults; len(faults) > 0 || c.admin == nil {
		c.show(w, r, http.StatusBadRequest, createView(d))
		return
	}
	dry := r.PostForm.Get("do") != "create"
	topic, err := c.place(r.Context(), &srtmv1.CreateTopicRequest{Spec: spec, DryRun: dry})
	if !dry {
		c.logAction("create", userOf(r.Context()), err, "topic", spec.Name)
	}
	switch {
	case err != nil:
		for _, detail := range status.Convert(err).Details() {
			switch detail := detail.(type) {
			case *errdetails.BadRequest:
				for _, v := range detail.FieldViolations {
					d.Faults = append(d.Faults, v.Field+": "+v.Description)
				}
			case *srtmv1.Infeasible:
				d.Infeasible = detail
			}
		}
		if len(d.Faults) == 0 && d.Infeasible == nil {
			d.Faults = []string{problemOf(err).text}
		}
		c.show(w, r, problemOf(err).status, createView(d))
	case dry:
		d.Plan = topic
		if p, ok := why.PlanPenalty(topic, offeredBy(spec)); ok {
			d.Penalty = &p
		}
		c.show(w, r, http.StatusOK, createView(d))
	default:
		http.Redirect(w, r, prefixOf(r)+query("/ui/topic", "name", spec.Name), http.StatusSeeOther)
	}
}

// place follows a creation or a dry run to its end.
func (c *Console) place(ctx context.Context, req *srtmv1.CreateTopicRequest) (*srtmv1.Topic, error) {
	ctx, cancel := context.WithTimeout(ctx, actionTimeout)
	defer cancel()
	return topics.Create(ctx, c.admin, req, nil)
}

// offeredBy returns the total rate of a specification's publishers, in msg/s. Without
// publishers, it returns the rate that leaves a tenth of the contract free.
func offeredBy(spec *srtmv1.TopicSpec) float64 {
	sum := 0.0
	for _, g := range spec.Groups {
		sum += float64(g.Count) * g.Rate
	}
	return cmp.Or(sum, float64(spec.Contract.RateMilli)/1100)
}

// specOf reads the form, or returns all its faults.
func specOf(form url.Values) (*srtmv1.TopicSpec, []string) {
	var faults []string
	contract, err := contractOf(form)
	if err != nil {
		faults = strings.Split(err.Error(), "\n")
	}
	spec := &srtmv1.TopicSpec{
		Name: strings.TrimSpace(form.Get("name")), PlacementPolicy: form.Get("policy"), ShareRule: form.Get("rule"), Channels: strings.Fields(form.Get("channels")), Contract: contract,
	}
	durability, found := srtmv1.Durability_value["DURABILITY_"+strings.ToUpper(form.Get("durability"))]
	if spec.Durability = srtmv1.Durability(durability); !found && form.Get("durability") != "" {
		faults = append(faults, fmt.Sprintf("durability: %.40q is none of memory, fsync and replicated", form.Get("durability")))
	}
	expiry, wrong := expiryFields(form)
	for _, fault := range wrong {
		faults = append(faults, fault.Error())
	}
	if expiry.Ttl != nil || expiry.MaxAttempts > 0 || expiry.DeadLetterTopic != "" {
		spec.Expiry = expiry
	}
	for line := range strings.Lines(form.Get("groups")) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		g, err := topics.ParseGroup(line)
		if err != nil {
			faults = append(faults, fmt.Sprintf("groups: %q: %v", line, err))
			continue
		}
		spec.Groups = append(spec.Groups, g)
	}
	return spec, faults
}
