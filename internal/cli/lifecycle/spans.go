package lifecycle

import (
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/tracing"
)

// SpanFlags are the flags of a process that sends spans.
type SpanFlags struct{ options tracing.Options }

// Add adds the flags to a command.
func (f *SpanFlags) Add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.options.Endpoint, "otlp-endpoint", "",
		"URL of an OpenTelemetry collector that gets spans of changes by gRPC: https://HOST:PORT, or http://HOST:PORT without TLS; "+
			"empty for none")
	flags.Float64Var(&f.options.Sample, "otlp-sample", 1,
		"which part of the changes has spans, 0 to 1; give all servers and nodes the same")
}

// Check rejects flags that cannot work.
func (f *SpanFlags) Check() error {
	if err := f.options.Check(); err != nil {
		return base.AsUsage(err)
	}
	return nil
}

// Asked reports whether a collector gets spans.
func (f *SpanFlags) Asked() bool { return f.options.Endpoint != "" }

// Open returns what sends spans of a process and the component that sends the last ones; both nil without the flags.
func (f *SpanFlags) Open(log *slog.Logger, process, machine string) (*tracing.Tracer, []Component, error) {
	o := f.options
	o.Service, o.Instance, o.Version, o.Log = "fairlead-"+process, machine, base.Version, log
	t, err := tracing.Open(o)
	if t == nil {
		return nil, nil, err
	}
	return t, []Component{{Name: "spans", Run: t.Run}}, nil
}
