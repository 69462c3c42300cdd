package migratecmd

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/migrate/nodecheck"
)

// checkSessions is what the Pod runs that looks for a node's connections with routers.
func (c *command) checkSessions() *cobra.Command {
	var texts []string
	var routers []netip.AddrPort
	var hold, within time.Duration
	cmd := &cobra.Command{
		Use: "check-sessions", Hidden: true, Args: base.NoArgs, Short: "Check the connections with routers (run by 'fairlead migrate')",
		Example: "  fairlead migrate check-sessions --routers 192.0.2.1:179",
		PreRunE: func(*cobra.Command, []string) error {
			for _, text := range texts {
				at, err := netip.ParseAddrPort(text)
				if err != nil {
					return base.Usagef("--routers has %q; want IP:PORT", text)
				}
				routers = append(routers, at)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := nodecheck.Sessions(cmd.Context(), routers, hold, within); err != nil {
				return err
			}
			fmt.Fprintf(c.Out, "%d routers have a connection\n", len(routers))
			return nil
		},
	}
	cmd.Flags().StringSliceVar(&texts, "routers", nil, "IP:PORT of the routers")
	cmd.Flags().DurationVar(&hold, "for", time.Second, "how long the connections must last")
	cmd.Flags().DurationVar(&within, "within", time.Minute, "how long to wait for them")
	return cmd
}
