package link

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// masqueradeTable is the one nft table of this package.
var masqueradeTable = nftables.Table{Family: nftables.Inet, Name: "fairlead-pods"}

// Masquerade gives packets of pods that leave the cluster the node's address.
type Masquerade struct{ conn *nftables.Conn }

// NewMasquerade returns a Masquerade in the network namespace of the calling thread,
// of which it changes nothing yet. changed is called, as that of
// nftables.Conn.Watch, when another program changes what Set has written.
func NewMasquerade(changed func()) (*Masquerade, error) {
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	if err := c.Watch(masqueradeTable.Name, changed); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &Masquerade{c}, nil
}

// Close ends the notifications; what Set has written stays.
func (m *Masquerade) Close() error { return m.conn.Close() }

// Set writes the rules. pods are the ranges of this node's pods, cluster those of
// all pods: packets to them keep their source. The table is replaced in one
// transaction.
func (m *Masquerade) Set(pods, cluster []netip.Prefix) error {
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
	if err := m.conn.Commit(b); err != nil {
		return fmt.Errorf("write nft table %s: %w", masqueradeTable, err)
	}
	return nil
}

// Unmasquerade removes the table. It is no error if there is none, or no
// nf_tables in the kernel.
func Unmasquerade() error { return nftables.RemoveTable(masqueradeTable) }
