// Package testbed makes small networks for tests out of network namespaces:
// hosts on a common underlay, pods behind them, clients outside. Nothing it
// does is seen by the machine's own network: Main moves the whole test process
// into its own namespace first, and needs no root for that.
//
// A test uses it like this:
//
//	func TestMain(m *testing.M) { testbed.Main(m) }
//
//	func TestPing(t *testing.T) {
//		n := testbed.NewNetwork(t)
//		web := n.Host("a").Pod("web")
//		web.Serve(svc.TCP, 80)
//		answer, err := n.Host("b").Ask(ctx, svc.TCP, netip.AddrPortFrom(web.Addr4(), 80))
//		...
//	}
package testbed
