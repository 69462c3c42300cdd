package hubble

import (
	"strings"
	"testing"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/hubble/api/observer"
)

// Many empty filters, or empty values in one, are refused before they are decoded.
func TestManyEmptyFilters(t *testing.T) {
	type r = observer.GetFlowsRequest
	empty := func(n int) (out []*flow.FlowFilter) {
		for range n {
			out = append(out, &flow.FlowFilter{})
		}
		return out
	}
	types := make([]*flow.EventTypeFilter, maxParts)
	for i := range types {
		types[i] = &flow.EventTypeFilter{}
	}
	c := dial(t, filled(8, 10))
	for name, q := range map[string]*r{
		"allow": {Whitelist: empty(maxParts + 1)}, "deny": {Blacklist: empty(maxParts + 1)},
		"values": {Whitelist: []*flow.FlowFilter{{EventType: types}}},
	} {
		answer, err := c.GetFlows(t.Context(), q)
		if err == nil {
			_, err = answer.Recv()
		}
		if err == nil || !strings.Contains(status.Convert(err).Message(), "more than 4000 fields") {
			t.Errorf("%s: %v", name, err)
		}
		text, err := proto.Marshal(q)
		if err != nil {
			t.Fatal(err)
		}
		if n := testing.AllocsPerRun(10, func() { _ = bounded(text, &r{}) }); n > 20 {
			t.Errorf("%s: %v allocations to refuse a request of %d bytes", name, n, len(text))
		}
	}
	if got := ports(t, c, &r{Whitelist: empty(3), Number: 2}); got != "9 10" {
		t.Errorf("a few empty filters: %s", got)
	}
}

func FuzzBounded(f *testing.F) {
	text, err := proto.Marshal(&observer.GetFlowsRequest{Whitelist: []*flow.FlowFilter{{SourcePort: []string{"1"}}, {}}, Number: 3})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte{0xff})
	f.Fuzz(func(t *testing.T, text []byte) {
		m := &observer.GetFlowsRequest{}
		err := bounded(text, m)
		if err == nil && proto.Unmarshal(text, m) == nil && len(m.GetWhitelist())+len(m.GetBlacklist()) > maxParts {
			t.Errorf("%d filters", len(m.GetWhitelist()))
		}
	})
}
