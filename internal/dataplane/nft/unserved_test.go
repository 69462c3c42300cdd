package nft

import (
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// A packet that finds a frontend but no endpoint, because both change while it is
// under way, is dropped: TCP sends it again. A refusal would end the connection.
func TestFrontendThatChangesIsNotRefused(t *testing.T) {
	e := flows.NewEnv(t, create)
	e.Apply(t, e.Stable(), nil)
	reached := flows.Row{From: "c", To: "cluster", Want: flows.Want{Reach: "a b d"}}
	e.Check(t, svc.IPv4, svc.TCP, &reached)
	e.Node.Do(func() { flows.Command(t, "", "nft", "flush", "map", "ip", tableName, setEndpoints) })
	dropped := flows.Row{From: "c", To: "cluster", Want: flows.Want{Dropped: true}}
	e.Check(t, svc.IPv4, svc.TCP, &dropped)
}

// observed calls before each transaction.
type observed struct {
	kernel
	before func()
}

func (o *observed) Commit(b *nftables.Batch) error {
	o.before()
	return o.kernel.Commit(b)
}

// While a new table is being filled, frontends that are not there yet are left to
// what an earlier mode wrote: the rules for unserved addresses come last.
func TestUnservedComesLast(t *testing.T) {
	withKernel(t, Config{}, func(p *Mode, k *counting) {
		var seen []string
		conn := k.kernel.(*nftables.Conn)
		k.kernel = &observed{k.kernel, func() {
			rules, err := conn.Rules(nftables.Table{Family: nftables.IPv4, Name: tableName})
			if err != nil {
				t.Fatal(err)
			}
			state := "open"
			if len(rules[chainUnserved]) > 0 {
				state = "closed"
			}
			if strings.Contains(flows.Command(t, "", "nft", "list", "ruleset"), "default/web") {
				state += ", written"
			}
			seen = append(seen, state)
		}}
		tab := table.New(flows.Port("web", "http", svc.IPv4, svc.TCP,
			table.Frontend{Addr: flows.AP("10.96.0.10:80"), Endpoints: flows.Endpoints("10.0.0.1:80")}))
		tab.ServiceCIDRs = flows.ServiceCIDRs
		flows.Apply(t, p, tab, nil)
		seen = slices.Compact(seen)
		if i := slices.Index(seen, "open, written"); i < 0 || slices.Contains(seen[:i], "closed") {
			t.Errorf("chain %s before each transaction: %q, want it open until the frontend is written", chainUnserved, seen)
		}
		if r := flows.Command(t, "", "nft", "list", "chain", "ip", tableName, chainUnserved); !strings.Contains(r, "10.96.0.0/16") {
			t.Errorf("in the end chain %s is\n%s", chainUnserved, r)
		}
	})
}
