// Package uml runs the tests of a package inside a User Mode Linux kernel: a
// real kernel, as a process of the user who runs the tests, that has what the
// machine's own may lack (IPVS, SCTP sockets, dummy devices, ipset). It needs the
// program linux.uml and its modules, which Debian has in the package
// user-mode-linux, and modprobe; test/setup.sh installs them. It needs no root.
//
// A package uses it like this:
//
//	func TestMain(m *testing.M) { uml.Main(m) }
//
// All tests of the package then run as root in the guest. Its root file system
// is the machine's own, to be read only; /tmp and /run are empty and the
// guest's, and the package's directory can be written (golden files). The guest
// has one processor, which stays on one of the machine's, and no network but what a test makes. Programs that tests
// need come in by the directory Shared, see Main.
//
// Fuzzing, and listing of tests, happens on the machine's own kernel.
package uml
