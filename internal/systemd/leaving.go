package systemd

import (
	"context"
	"os"

	"github.com/godbus/dbus/v5"
)

// Leaving reports whether systemd stops the unit of this process, as when the machine shuts down, and does not start it again:
// its job is "stop", and that of 'systemctl restart' is "restart". It is false where systemd does not run the process or
// cannot be asked.
func Leaving(ctx context.Context) bool {
	if os.Getenv("INVOCATION_ID") == "" { // systemd.exec(5)
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, leavingTimeout)
	defer cancel()
	conn, err := connect(ctx)
	if err != nil {
		return false
	}
	defer conn.Close()
	var path dbus.ObjectPath
	err = conn.Object(destination, managerPath).CallWithContext(ctx, manager+".GetUnitByPID", 0, uint32(os.Getpid())).Store(&path)
	if err != nil {
		return false
	}
	var job struct { // of type (uo)
		ID   uint32
		Path dbus.ObjectPath
	}
	if err := property(ctx, conn, path, unitInterface, "Job", &job); err != nil || job.ID == 0 {
		return false
	}
	var kind string
	return property(ctx, conn, job.Path, destination+".Job", "JobType", &kind) == nil && kind == "stop"
}

// property reads a property of an object into to.
func property(ctx context.Context, conn *dbus.Conn, path dbus.ObjectPath, of, name string, to any) error {
	return conn.Object(destination, path).CallWithContext(ctx, properties+".Get", 0, of, name).Store(to)
}
