// Package kubeproxy finds and removes the rules that a kube-proxy left on a
// node: they answer the same packets as ours, and never change any more.
package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// tableName is the name of its nf_tables tables, of both families.
const tableName = "kube-proxy"

// chains and prefixes are the names of its iptables chains, of modes iptables
// and ipvs. The kubelet's are not among them (KUBE-FIREWALL,
// KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT).
var (
	chains = []string{
		"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-FORWARD",
		"KUBE-PROXY-FIREWALL", "KUBE-PROXY-CANARY", "KUBE-MARK-MASQ", "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER",
		"KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
	}
	prefixes = []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-FW-", "KUBE-EXT-", "KUBE-SEP-", "KUBE-XLB-"}
)

func its(chain string) bool {
	return slices.Contains(chains, chain) || slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(chain, p) })
}

// Find describes kube-proxy's rules, one line each; none, if there are none. It works
// in the network namespace of the calling thread.
func Find(ctx context.Context) ([]string, error) {
	var out []string
	tables, err := nftables.Find(tableName)
	for _, t := range tables {
		out = append(out, "table "+t.String()+" of nf_tables")
	}
	err = errors.Join(err, iptables.Each(func(t *iptables.Tool) error {
		p, err := t.Part(ctx, its)
		if err == nil && p.Chains > 0 {
			out = append(out, fmt.Sprintf("%d chains of iptables (%s, %s)", p.Chains, t.Variant(), t.Family()))
		}
		return err
	}))
	return out, err
}

// Remove takes it away. What a running kube-proxy needs it writes again.
func Remove(ctx context.Context) error {
	return errors.Join(nftables.Remove(ctx, tableName), iptables.RemoveChains(ctx, its))
}
