package cli

import (
	"log/slog"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/dns/resolvconf"
)

func addConfigureResolver(cmd *cobra.Command, set *bool) {
	cmd.Flags().BoolVar(set, "configure-resolver", false,
		"let the programs of this machine resolve the cluster's names: write its DNS into "+resolvconf.Path+
			", and put the original back at the end")
}

// checkResolver rejects a resolver that --configure-resolver cannot configure.
func checkResolver(set bool) error {
	if !set {
		return nil
	}
	return resolvconf.Check(resolvconf.Path)
}

// resolverComponent writes server into /etc/resolv.conf while it runs. It comes after the
// DNS server, and is ready when it has tried: a node without it is better than none.
func resolverComponent(log *slog.Logger, server netip.Addr) component {
	w := resolvconf.NewWriter(resolvconf.Path, server, log)
	return component{name: "resolver", run: w.Run, ready: untilClosed(w.Tried())}
}
