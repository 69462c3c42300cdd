package nftables

import "golang.org/x/sys/unix"

// The keys and values of Conntrack.
const (
	CtState  = unix.NFT_CT_STATE
	CtStatus = unix.NFT_CT_STATUS

	CtStateInvalid     = 1
	CtStateEstablished = 2
	CtStateRelated     = 4
	CtStateNew         = 8
	CtStateUntracked   = 64
	CtStatusDNAT       = 1 << 5
)

// Conntrack loads connection tracking's state of the packet (ct).
func (p *Program) Conntrack(to Reg, key uint32) *Program {
	return load(p, "ct", unix.NFTA_CT_KEY, key, unix.NFTA_CT_DREG, to)
}

// OriginalAddress loads the destination that the connection's first packet came with, before it was translated. It ends the
// rule for packets of another family (ct original). Since Linux 4.17.
func OriginalAddress(p *Program, f Family, to Reg) *Program {
	if f == IPv6 {
		return original(p, to, unix.NFT_CT_DST_IP6)
	}
	return original(p, to, unix.NFT_CT_DST_IP)
}

// OriginalPort loads the port of OriginalAddress (ct original).
func OriginalPort(p *Program, to Reg) *Program { return original(p, to, unix.NFT_CT_PROTO_DST) }

func original(p *Program, to Reg, key uint32) *Program {
	p.enc.begin("ct")
	p.enc.Uint32(unix.NFTA_CT_KEY, key)
	p.enc.Uint32(unix.NFTA_CT_DREG, to.number())
	p.enc.Uint8(unix.NFTA_CT_DIRECTION, 0) // IP_CT_DIR_ORIGINAL
	p.enc.end()
	return p
}
