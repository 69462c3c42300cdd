package link

import (
	"encoding/binary"
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// inwardName is the name of the tables of SetInward, one of family ip and one of ip6: kernels may lack family inet.
const inwardName = "fairlead-drain"

const (
	inwardAddrs = "pods"
	inwardChain = "output"
	// inwardPriority is before the translation of a proxy and of other programs.
	inwardPriority = nftables.PriorityDstNAT - 10
)

// SetInward leads the connections to a TCP port of addrs that root's processes of this machine open to the same port of this
// machine's loopback address: socket.OriginalDestination has the address that was called. It is the same in every mode of the
// proxy. Packets that the machine forwards do not pass the hook, and other users do not match. Where nothing listens the kernel
// refuses the connection at once. The error is a *nftables.UnsupportedError where the kernel cannot have the tables.
func SetInward(port uint16, addrs []netip.Addr) error {
	c, err := nftables.Dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	var errs []error
	for _, f := range sourceFamilies() {
		t := inwardTable(f)
		b := nftables.NewBatch()
		b.Tag(familyTag(t))
		b.ReplaceTable(t, "leads preStop requests of this node to its proxy")
		addInward(b, t, f, port)
		for _, a := range addrs {
			if svc.FamilyOf(a) == f {
				b.AddElem(t, inwardAddrs, &nftables.Elem{Key: a.AsSlice()})
			}
		}
		errs = append(errs, c.CommitTable(t, b))
	}
	return errors.Join(errs...)
}

// ProbeInward returns why SetInward cannot work here, or nil. It asks the kernel in transactions that take back what they
// make.
func ProbeInward() error {
	c, err := nftables.Dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	for _, f := range sourceFamilies() {
		t := inwardTable(f)
		t.Name += "-probe"
		b := nftables.NewBatch()
		b.Tag(familyTag(t))
		b.AddTable(t, "")
		addInward(b, t, f, 1)
		b.DelTable(t)
		if err := c.CommitTable(t, b); err != nil {
			return err
		}
	}
	return nil
}

// CloseInward takes back what SetInward did. It is no error if there is nothing, or no nf_tables in the kernel.
func CloseInward() error {
	return errors.Join(nftables.RemoveTable(inwardTable(svc.IPv4)), nftables.RemoveTable(inwardTable(svc.IPv6)))
}

func inwardTable(f svc.Family) nftables.Table {
	return nftables.Table{Family: nftables.FamilyOf(f), Name: inwardName}
}

// addInward adds what a table has beside elements.
func addInward(b *nftables.Batch, t nftables.Table, f svc.Family, port uint16) {
	h := nftables.HeaderOf(f)
	at := binary.BigEndian.AppendUint16(nil, port)
	root := make([]byte, 4)
	b.Tag("a set, a chain of type nat, or an expression of a rule")
	b.AddSet(t, nftables.Set{Name: inwardAddrs, Key: []nftables.Type{h.Addr}, Comment: "addresses of this node's pods"})
	b.AddChain(t, nftables.Chain{
		Name: inwardChain, Hook: &nftables.Hook{Type: "nat", Number: nftables.Output, Priority: inwardPriority},
	})
	b.AddRule(t, inwardChain, nftables.NewRule(
		new(nftables.Program).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{unix.IPPROTO_TCP}).
			Port(0, nftables.Destination).Equal(0, at).Meta(0, unix.NFT_META_SKUID).Equal(0, root).
			Network(0, h.Destination, h.Len).InSet(inwardAddrs, 0).Value(0, at).Redirect(0),
		"tcp dport %d meta skuid 0 %s daddr @%s redirect to :%d", port, h.Word, inwardAddrs, port))
	b.Tag(nil)
}
