package link

import (
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// masqueradeTable is the one nft table of this package.
var masqueradeTable = nftables.Table{Family: nftables.Inet, Name: "fairlead-pods"}

// Masquerade gives packets of pods that leave the cluster the node's address.
// pods are the ranges of this node's pods, cluster those of all pods: packets to
// them keep their source. The table is replaced in one transaction.
func Masquerade(pods, cluster []netip.Prefix) error {
	c, err := nftables.Dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	const chain = "postrouting"
	b := nftables.NewBatch()
	b.ReplaceTable(masqueradeTable, "masquerades what pods send out of the cluster")
	b.AddChain(masqueradeTable, nftables.Chain{
		Name: chain, Hook: &nftables.Hook{Type: "nat", Number: nftables.Postrouting, Priority: nftables.PrioritySrcNAT},
	})
	for _, p := range cluster {
		h := nftables.HeaderOf(svc.FamilyOf(p.Addr()))
		b.AddRule(masqueradeTable, chain, nftables.NewRule(h.InetPrefix(h.Destination, p).Return(), "%s daddr %s return", h.Word, p))
	}
	for _, p := range pods {
		h := nftables.HeaderOf(svc.FamilyOf(p.Addr()))
		b.AddRule(masqueradeTable, chain, nftables.NewRule(h.InetPrefix(h.Source, p).Masquerade(), "%s saddr %s masquerade", h.Word, p))
	}
	if err := c.Commit(b); err != nil {
		return fmt.Errorf("write nft table %s: %w", masqueradeTable, err)
	}
	return nil
}

// Unmasquerade removes the table. It is no error if there is none, or no
// nf_tables in the kernel.
func Unmasquerade() error { return nftables.RemoveTable(masqueradeTable) }
