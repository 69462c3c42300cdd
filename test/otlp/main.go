// Command otlp is a collector for the tests: the OTLP receiver of the OpenTelemetry collector, which prints the traces
// that it accepts. It writes "ready" when it listens at the address HOST:PORT, and then a line for each request: the
// protobuf message ExportTraceServiceRequest, in base64. SIGTERM ends it.
package main

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
)

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "otlp:", err)
		os.Exit(1)
	}
}

// run serves at an address until a signal ends it.
func run(address string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	factory := otlpreceiver.NewFactory()
	config := factory.CreateDefaultConfig()
	given := map[string]any{"protocols": map[string]any{"grpc": map[string]any{"endpoint": address}}}
	if err := confmap.NewFromStringMap(given).Unmarshal(config); err != nil {
		return err
	}
	out, err := consumer.NewTraces(func(_ context.Context, all ptrace.Traces) error {
		text, err := (&ptrace.ProtoMarshaler{}).MarshalTraces(all)
		if err == nil {
			_, err = fmt.Println(base64.StdEncoding.EncodeToString(text))
		}
		return err
	})
	if err != nil {
		return err
	}
	settings := receiver.Settings{ID: component.NewID(factory.Type()), TelemetrySettings: componenttest.NewNopTelemetrySettings()}
	r, err := factory.CreateTraces(ctx, settings, config, out)
	if err != nil {
		return err
	}
	if err := r.Start(ctx, componenttest.NewNopHost()); err != nil {
		return err
	}
	fmt.Println("ready")
	<-ctx.Done()
	return r.Shutdown(context.WithoutCancel(ctx))
}
