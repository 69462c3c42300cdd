package parts

import (
	"log/slog"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/dns/resolvconf"
)

// AddConfigureResolver adds --configure-resolver.
func AddConfigureResolver(cmd *cobra.Command, set *bool) {
	cmd.Flags().BoolVar(set, "configure-resolver", false,
		"let the programs of this machine resolve the cluster's names: write its DNS into "+resolvconf.Path+
			", and put the original back at the end")
}

// CheckResolver rejects a resolver that --configure-resolver cannot configure.
func CheckResolver(set bool) error {
	if !set {
		return nil
	}
	return resolvconf.Check(resolvconf.Path)
}

// ResolverComponent writes server into /etc/resolv.conf while it runs. It comes after the
// DNS server, and is ready when it has tried: a node without it is better than none.
func ResolverComponent(log *slog.Logger, server netip.Addr) lifecycle.Component {
	w := resolvconf.NewWriter(resolvconf.Path, server, log)
	return lifecycle.Component{Name: "resolver", Run: w.Run, Ready: lifecycle.UntilClosed(w.Tried())}
}
