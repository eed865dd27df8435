package console

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
)

// node is a node that nsqlookupd returns to consumers.
type node struct {
	Hostname   string   `json:"hostname"`
	Broadcast  string   `json:"broadcast_address"`
	HTTP       int      `json:"http_port"`
	Version    string   `json:"version"`
	Topics     []string `json:"topics"`
	Tombstones []bool   `json:"tombstones"`
}

// Name returns the node's name in tombstones.
func (n node) Name() string { return n.Broadcast + ":" + strconv.Itoa(n.HTTP) }

type nodesData struct {
	Nodes   []node
	Pager   pager
	Trouble string
}

// nodes shows the nodes that nsqlookupd returns to consumers.
func (c *Console) nodes(ctx context.Context, q url.Values, _ user) (view, error) {
	var d struct {
		Producers []node `json:"producers"`
	}
	body, err := c.requester.ask(ctx, c.cfg.Lookup, http.MethodGet, "lookup", "/nodes")
	if err == nil {
		err = json.Unmarshal(body, &d)
	}
	var data nodesData
	data.Nodes, data.Pager = paged(d.Producers, "/ui/nodes", q, "from")
	if err != nil {
		data.Trouble = err.Error()
	}
	return view{Template: "nodes", Title: "Nodes", Crumbs: []link{{"Brokers", "/ui/brokers"}}, Data: data}, nil
}
