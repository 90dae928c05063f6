module penstock/benches/go

go 1.21
