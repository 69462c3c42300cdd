package flows

import "github.com/fairlead/fairlead/internal/svc"

// limits is what a mode cannot do in any row, by its nature.
type limits struct {
	// protocols are not carried at all, with the reason.
	protocols map[svc.Protocol]string
	// hides says why endpoints see the node's address where other modes show
	// them the client's: that is then what rows ask for.
	hides string
	// noLoopback is that of table.Config.
	noLoopback bool
}

// limitsOf knows the modes that have any. What a mode lacks in single rows is
// in Row.Lacks.
var limitsOf = map[string]limits{
	"ipvs": {noLoopback: true},
	"userspace": {
		protocols: map[svc.Protocol]string{svc.SCTP: "behaviours 43, 176: the userspace mode does not carry SCTP"},
		hides:     "behaviour 41: the userspace mode hides the client's address",
	},
}

// as returns the row as a mode answers it.
func (r *Row) as(mode string) *Row {
	if limitsOf[mode].hides == "" || r.Want.Client != "kept" {
		return r
	}
	c := *r
	c.Want.Client = "masqueraded"
	return &c
}

// An Option says how a mode differs in Stories.
type Option func(*options)

type options struct{ relayed, balanced bool }

// Relayed is for modes in which the node itself answers the client, so that
// connection tracking knows nothing of endpoints: the mode has to take UDP
// clients away from them itself.
func Relayed(o *options) { o.relayed = true }

// Balanced is for modes in which IPVS translates. Connection tracking does not
// mark such connections as translated. Affinity of TCP clients outlasts its time
// there until their closed connections are forgotten, two minutes later: UDP,
// whose flows end sooner, shows that it ends.
func Balanced(o *options) { o.balanced = true }
